//! The examples of `docs/text-form.md` parse, print back and keep the rules.

use ir::verify::{verify, verify_sharded};
use ir::verify_program::verify_program;

/// The fenced blocks of a page with this label.
fn blocks<'a>(page: &'a str, label: &str) -> Vec<&'a str> {
    let fence = format!("```{label}\n");
    page.split(fence.as_str()).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

fn without_comments(text: &str) -> String {
    text.lines().map(|l| format!("{}\n", l.split(';').next().unwrap_or("").trim_end())).collect()
}

#[test]
fn the_text_form_is_as_its_page_says() {
    let page = include_str!("../../docs/text-form.md");
    for text in blocks(page, "graph") {
        let graph = ir::parse_graph(text).unwrap();
        assert_eq!(graph.to_string(), without_comments(text));
        assert_eq!(verify(&graph), Ok(()));
    }
    for text in blocks(page, "sharded") {
        let sharded = ir::parse_sharded(text).unwrap();
        assert_eq!(sharded.to_string(), without_comments(text));
        assert_eq!(verify_sharded(&sharded), Ok(()));
    }
    for text in blocks(page, "program") {
        let program = ir::parse_program(text).unwrap();
        assert_eq!(program.to_string(), without_comments(text));
        assert_eq!(verify_program(&program), Ok(()));
    }
    assert_eq!(["graph", "sharded", "program"].map(|l| blocks(page, l).len()), [2, 1, 1]);
}
