//! The lines of the tables: inputs, states, the optimizer.

use super::scan::Scan;
use crate::Name;
use crate::state::{AdamW, Init, Input, Role, State, View};

fn show_dims(dims: &[(Name, usize)]) -> String {
    let dims: Vec<String> = dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
    format!("[{}]", dims.join(", "))
}

fn parse_dims(scan: &mut Scan) -> Result<Vec<(Name, usize)>, String> {
    scan.expect("[")?;
    scan.list("]", |scan| {
        let name = scan.word()?;
        scan.expect("=")?;
        Ok((name.into(), scan.number()?))
    })
}

pub(super) fn show_input(input: &Input) -> String {
    format!("input {} : {} {}", input.name, input.dtype, show_dims(&input.dims))
}

/// Reads what follows `input `.
pub(super) fn parse_input(text: &str) -> Result<Input, String> {
    let mut scan = Scan::new(text);
    let name = scan.word()?.into();
    scan.expect(":")?;
    let input = Input { name, dtype: scan.word()?.parse()?, dims: parse_dims(&mut scan)? };
    if scan.done() { Ok(input) } else { Err(format!("unexpected `{}`", scan.rest())) }
}

pub(super) fn show_state(state: &State) -> String {
    let role = match &state.role {
        Role::Parameter { trainable, decays } => {
            let mut flags = Vec::new();
            flags.extend(trainable.then_some("trainable"));
            flags.extend(decays.then_some("decays"));
            format!("parameter({})", flags.join(", "))
        }
        Role::Moment(of) => format!("moment({of})"),
        Role::Master(of) => format!("master({of})"),
        Role::Step => "step".to_string(),
    };
    let init = match state.init {
        Init::Zeros => "zeros".to_string(),
        Init::Ones => "ones".to_string(),
        Init::Normal(std) => format!("normal({std:?})"),
    };
    let mut text = format!("state {} : {} {} {role} {init}", state.name, state.dtype, show_dims(&state.dims));
    for view in &state.views {
        let dims: Vec<String> = view.dims.iter().map(|(size, stride)| format!("{size}:{stride}")).collect();
        let shape: Vec<String> = view.shape.iter().map(usize::to_string).collect();
        text += &format!(
            " from {:?} [{}] at {} [{}]",
            &*view.file,
            shape.join(", "),
            view.offset,
            dims.join(", ")
        );
    }
    text
}

/// Reads what follows `state `.
pub(super) fn parse_state(text: &str) -> Result<State, String> {
    let mut scan = Scan::new(text);
    let name = scan.word()?.into();
    scan.expect(":")?;
    let dtype = scan.word()?.parse()?;
    let dims = parse_dims(&mut scan)?;
    let role = match scan.word()? {
        "parameter" => {
            scan.expect("(")?;
            let flags = scan.list(")", |scan| scan.word())?;
            if let Some(other) = flags.iter().find(|f| !["trainable", "decays"].contains(f)) {
                return Err(format!("a parameter is trainable or decays, not `{other}`"));
            }
            Role::Parameter { trainable: flags.contains(&"trainable"), decays: flags.contains(&"decays") }
        }
        "moment" => {
            scan.expect("(")?;
            Role::Moment(scan.until(")")?.into())
        }
        "master" => {
            scan.expect("(")?;
            Role::Master(scan.until(")")?.into())
        }
        "step" => Role::Step,
        other => {
            return Err(format!("a state is a parameter, a master, a moment or the step, not `{other}`"));
        }
    };
    let init = match scan.word()? {
        "zeros" => Init::Zeros,
        "ones" => Init::Ones,
        "normal" => {
            scan.expect("(")?;
            let std = scan.number()?;
            scan.expect(")")?;
            Init::Normal(std)
        }
        other => return Err(format!("a state starts as zeros, ones or normal(s), not `{other}`")),
    };
    let mut views = Vec::new();
    while scan.eat("from ") {
        let file = scan.quoted()?.into();
        scan.expect("[")?;
        let shape = scan.list("]", |scan| scan.number())?;
        scan.expect("at ")?;
        let offset = scan.number()?;
        scan.expect("[")?;
        let dims = scan.list("]", |scan| {
            let size = scan.number()?;
            scan.expect(":")?;
            Ok((size, scan.number()?))
        })?;
        views.push(View { file, shape, offset, dims });
    }
    if !scan.done() {
        return Err(format!("unexpected `{}`", scan.rest()));
    }
    Ok(State { name, dtype, dims, role, init, views })
}

pub(super) fn show_adamw(a: &AdamW) -> String {
    let clip = a.clip.map_or("none".to_string(), |c| format!("{c:?}"));
    format!(
        "adamw lr={:?} min_lr={:?} warmup={} steps={} beta1={:?} beta2={:?} eps={:?} weight_decay={:?} clip={clip}",
        a.lr, a.min_lr, a.warmup, a.steps, a.beta1, a.beta2, a.eps, a.weight_decay
    )
}

/// Reads what follows `adamw `.
pub(super) fn parse_adamw(text: &str) -> Result<AdamW, String> {
    let mut a = AdamW::default();
    for word in text.split_whitespace() {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` reads key=value"))?;
        let float = || value.parse::<f64>().map_err(|_| format!("`{value}` is no number"));
        let count = || value.parse::<usize>().map_err(|_| format!("`{value}` is no count"));
        match key {
            "lr" => a.lr = float()?,
            "min_lr" => a.min_lr = float()?,
            "warmup" => a.warmup = count()?,
            "steps" => a.steps = count()?,
            "beta1" => a.beta1 = float()?,
            "beta2" => a.beta2 = float()?,
            "eps" => a.eps = float()?,
            "weight_decay" => a.weight_decay = float()?,
            "clip" => a.clip = if value == "none" { None } else { Some(float()?) },
            _ => return Err(format!("adamw has no `{key}`")),
        }
    }
    Ok(a)
}
