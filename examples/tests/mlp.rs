//! The plan that a newcomer sees first.

use std::path::PathBuf;
use std::process::Command;

fn mlp(args: &[&str]) -> String {
    run("mlp", args)
}

fn run(example: &str, args: &[&str]) -> String {
    let test = std::env::current_exe().unwrap();
    let target: PathBuf = test.ancestors().nth(2).unwrap().to_path_buf();
    let done = Command::new(target.join("examples").join(example)).args(args).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn the_plan_fits_a_screen_and_has_units() {
    let text = mlp(&["plan", "--mesh", "tp=4"]);
    assert!(text.lines().count() <= 40 && text.lines().all(|l| l.chars().count() <= 100), "{text}");
    // Every number is followed by its unit, or is a name's or a stage's.
    for line in text.lines().filter(|l| l.contains("rank") || l.contains("step")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        for (i, word) in words.iter().enumerate() {
            let number = word.chars().next().is_some_and(|c| c.is_ascii_digit());
            let unit =
                words.get(i + 1).is_some_and(|w| w.starts_with(|c: char| c.is_alphabetic() || c == '%'));
            assert!(!number || unit, "`{word}` in `{line}` has no unit");
        }
    }
}

#[test]
fn the_plan_as_it_is_printed() {
    // A cluster whose memory does not depend on the machine that runs the test.
    insta::assert_snapshot!(mlp(&["plan", "--mesh", "tp=4", "--cluster", "h100"]));
    insta::assert_snapshot!(mlp(&["plan", "--mesh", "dp=2,tp=2", "--cluster", "h100", "--mode", "forward"]));
}

#[test]
fn a_model_of_ones_own_has_the_commands() {
    let text =
        run("gpt", &["check", "--mesh", "dp=2,tp=3", "--global-batch", "3", "--seq", "4", "--numeric"]);
    assert_eq!(text.lines().filter(|l| l.starts_with("ok  ")).count(), 6, "{text}");
}
