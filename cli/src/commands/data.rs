//! `meshc data encode`: text to token ids.

use runtime::data::text::encode;

use super::print;
use crate::args::DataCommand;
use crate::failure::Failure;

pub(crate) fn run(command: &DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Encode { text, tokenizer, output } => {
            let s = encode(text, tokenizer, output)?;
            let each = s.bytes as f64 / s.tokens.max(1) as f64;
            print(&format!(
                "{}: {} tokens of a vocabulary of {}, {each:.2} bytes a token, {} bits each\n",
                output.display(),
                planner::units::grouped(s.tokens as u64),
                s.vocabulary,
                s.bits
            ))
        }
    }
}
