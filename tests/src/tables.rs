//! Tables in the docs that a test makes.

use std::path::Path;

/// Holds a table of a page of docs against its rows; with `MESHC_UPDATE` it is written anew. `head` is the line of
/// column names.
///
/// # Panics
/// If the page is old.
pub fn hold(page: &str, head: &str, rows: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let (above, table) = text.split_once(head).unwrap_or((&text, ""));
    let below: String = table
        .split_inclusive('\n')
        .enumerate()
        .skip_while(|(i, l)| *i == 0 || l.starts_with('|'))
        .map(|(_, l)| l)
        .collect();
    let line = "|---".repeat(head.matches('|').count() - 1);
    let new = format!("{above}{head}\n{line}|\n{rows}{below}");
    if std::env::var("MESHC_UPDATE").is_ok() {
        std::fs::write(&path, &new).expect("docs can be written");
        return;
    }
    assert!(text == new, "docs/{page} is old: run with MESHC_UPDATE=1");
}
