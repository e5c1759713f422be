//! `meshc trace`: what every pass made of the model, once each; `unchanged` where it is.

use ir::state::AdamW;

use super::print;
use crate::args::TraceArgs;
use crate::failure::Failure;
use crate::request::{self, Origin};

pub(crate) fn run(origin: &Origin, args: &TraceArgs) -> Result<(), Failure> {
    let request = request::read(origin, &args.split, None)?;
    let mut before = String::new();
    let mut forms: Vec<(&'static str, String)> = Vec::new();
    request.compile(AdamW::default(), false, &mut |name, form| {
        let text = form.to_string();
        let shown = if text == before {
            format!("after {name}: unchanged\n")
        } else {
            format!("after {name}\n{text}")
        };
        before = text;
        forms.push((name, shown));
    });
    if let Some(pass) = &args.pass {
        let Some((_, text)) = forms.iter().find(|(name, _)| name == pass) else {
            let names: Vec<&str> = forms.iter().map(|(n, _)| *n).collect();
            return Err(Failure::Request(format!(
                "there is no pass `{pass}`; there are {}",
                names.join(", ")
            )));
        };
        return print(text);
    }
    let texts: Vec<String> = forms.into_iter().map(|(_, text)| text).collect();
    print(&texts.join("\n"))
}
