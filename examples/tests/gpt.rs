//! The small GPT in mixed precision: its loss follows that of f32.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Steps, unless `MESHC_GPT_STEPS` says otherwise.
const STEPS: &str = "12";

fn gpt(args: &[&str]) {
    let test = std::env::current_exe().expect("a test has a path");
    let target: PathBuf = test.ancestors().nth(2).expect("a target folder").to_path_buf();
    let done = Command::new(target.join("examples/gpt")).args(args).output().expect("the example is built");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The losses of a run, read from its metrics.
fn losses(folder: &Path, ids: &Path, dtype: &str, steps: &str) -> Vec<f64> {
    let metrics = folder.join(dtype);
    let (ids, metrics) = (ids.to_str().expect("a path"), metrics.to_str().expect("a path"));
    let size = ["--mesh", "dp=2", "--global-batch", "16", "--seq", "128", "--data", ids, "--quiet"];
    let rates = ["--steps", steps, "--lr", "3e-3", "--min-lr", "3e-4", "--warmup", "20", "--clip", "1"];
    let run = ["--dtype", dtype, "--metrics", metrics];
    gpt(&[&["train"], &size[..], &rates[..], &run[..]].concat());
    let text = std::fs::read_to_string(metrics).expect("the metrics are there");
    let loss = |line: &str| {
        let (_, rest) = line.split_once("\"loss\":").expect("a loss");
        rest.split(',').next().and_then(|n| n.parse().ok()).expect("a number")
    };
    text.lines().map(loss).collect()
}

/// Within 1 %: a rounding of 2^-9 in each activation averages out over tokens, but moves the path of training.
#[test]
fn mixed_precision_follows_f32() {
    let steps = std::env::var("MESHC_GPT_STEPS").unwrap_or_else(|_| STEPS.to_string());
    let folder = std::env::temp_dir().join(format!("meshc-gpt-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpt");
    let ids = folder.join("ids.npy");
    let files = [text.join("text.txt"), text.join("tokenizer.json"), ids.clone()];
    let [text, tokenizer, out] = files.each_ref().map(|p| p.to_str().expect("a path"));
    gpt(&["data", "encode", text, "--tokenizer", tokenizer, "-o", out]);
    let [f32, bf16] = ["f32", "bf16"].map(|dtype| losses(&folder, &ids, dtype, &steps));
    std::fs::remove_dir_all(&folder).expect("the folder can go");
    assert_eq!(f32.len(), bf16.len());
    assert!(f32.len() == 1 || f32 != bf16, "the types make no difference");
    let last = f32.len() - 1;
    assert!((f32[last] - bf16[last]).abs() < 0.01 * f32[last], "{} and {}", f32[last], bf16[last]);
}
