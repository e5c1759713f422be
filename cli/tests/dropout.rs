//! Dropout on the command line: the config's rates hold in training and nowhere else, --dropout overrides them, and a run
//! that goes on from a checkpoint drops what it would have dropped.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

const CONFIG: &str = r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 31,
 "activation_function": "gelu_new", "attn_pdrop": RATE, "embd_pdrop": RATE, "resid_pdrop": RATE}"#;

/// A folder with a tiny model of these rates, and token ids.
fn tiny(rate: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), CONFIG.replace("RATE", rate)).unwrap();
    let ids: Vec<u16> = (0..4000u32).map(|i| (i * i % 31) as u16).collect();
    runtime::data::npy::write_npy_u16(&folder.path().join("ids.npy"), &ids).unwrap();
    folder
}

/// What is said; words are divided by spaces, and @ is the folder.
#[track_caller]
fn expect(folder: &Path, words: &str, status: i32) -> String {
    let words = words.replace('@', &folder.display().to_string());
    let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(words.split_whitespace()).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(status), "{words}: {text}");
    assert!(!text.contains("panicked"), "{words}: {text}");
    text
}

/// Trains, and gives the loss of each step.
#[track_caller]
fn losses(folder: &Path, words: &str) -> Vec<f64> {
    let train = "train @/config.json --data @/ids.npy --seq 8 --global-batch 6 --lr 0.01 --metrics @/m.jsonl";
    expect(folder, &format!("{train} {words}"), 0);
    let text = std::fs::read_to_string(folder.join("m.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

#[track_caller]
fn close(found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len());
    let near = found.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-4 * b);
    assert!(near, "{found:?}, not {want:?}");
}

#[test]
fn the_rates_of_the_config_hold_unless_they_are_overridden() {
    let (none, some) = (tiny("0"), tiny("0.2"));
    let without = losses(none.path(), "--steps 3");
    let with = losses(some.path(), "--steps 3");
    assert_ne!(without, with);
    assert_eq!(losses(some.path(), "--steps 3 --dropout 0"), without);
    assert_eq!(losses(none.path(), "--steps 3 --dropout 0.2"), with);
    assert_ne!(losses(some.path(), "--steps 3 --dropout 0.5"), with);
    assert_ne!(losses(some.path(), "--steps 3 --seed 1"), with);
}

#[test]
fn every_mesh_drops_the_same() {
    let folder = tiny("0.2");
    let want = losses(folder.path(), "--steps 4");
    for words in [
        "--mesh dp=2",
        "--mesh tp=2",
        "--mesh dp=2,tp=2 --microbatches 2",
        "--mesh dp=4 --zero 3 --microbatches 2",
        "--microbatches 3 --recompute full",
        "--mesh dp=3 --zero 2 --recompute selective",
    ] {
        close(&losses(folder.path(), &format!("--steps 4 {words}")), &want);
    }
    losses(folder.path(), "--steps 4 --mesh dp=2 --dtype bf16");
}

#[test]
fn a_run_that_goes_on_drops_what_it_would_have_dropped() {
    let folder = tiny("0.2");
    let at = |name: &str| format!("--steps 6 --checkpoint @/{name} --every 3 --save @/{name}-saved");
    let whole = losses(folder.path(), &at("whole"));
    // Lines of steps before the checkpoint stay in the metrics.
    for mesh in ["--mesh dp=2", ""] {
        std::fs::remove_dir_all(folder.path().join("whole").join("step-000006")).unwrap();
        let again = losses(folder.path(), &format!("{} --resume {mesh}", at("whole")));
        close(&again, &whole);
        assert!(!mesh.is_empty() || again == whole, "{again:?}, not {whole:?}");
    }
}

#[test]
fn only_training_has_dropout() {
    let folder = tiny("0.2");
    let trace = |words: &str| expect(folder.path(), &format!("trace @/config.json --seq 8 {words}"), 0);
    let train = trace("--mesh dp=2,tp=2");
    for name in ["transformer.drop", "h.1.attn.attn_dropout", "h.0.attn.resid_dropout", "h.1.mlp.dropout"] {
        assert!(train.contains(name), "{name} is not drawn");
    }
    assert!(!trace("--mesh dp=2 --mode forward").contains("random("));
    assert!(!trace("--mesh dp=2 --dropout 0").contains("random("));
}

#[test]
fn plans_with_dropout_are_checked() {
    let folder = tiny("0.2");
    expect(folder.path(), "plan @/config.json --seq 8 --mesh dp=2,tp=2 --microbatches 2 -o @/plan", 0);
    let said = expect(folder.path(), "check @/plan --numeric", 0);
    assert!(said.contains("lockstep equal one device"), "{said}");
    expect(folder.path(), "show @/plan", 0);
    let checked = "check @/config.json --seq 8 --numeric --seed 3";
    for words in ["--mesh dp=2,tp=2", "--mesh dp=2 --zero 3 --microbatches 2 --recompute full"] {
        expect(folder.path(), &format!("{checked} {words}"), 0);
    }
}

#[test]
fn rates_that_make_no_sense_are_refused() {
    let folder = tiny("0.2");
    for p in ["1", "-0.1", "1.5", "nan"] {
        let said = expect(folder.path(), &format!("plan @/config.json --seq 8 --dropout={p}"), 2);
        assert!(said.contains("a rate from 0 to below 1 is needed"), "{said}");
    }
    let wrong = tiny("1.0");
    let said = expect(wrong.path(), "plan @/config.json --seq 8", 2);
    assert!(said.contains("`embd_pdrop` is 1.0, but needs to be a number from 0 to below 1"), "{said}");
}

/// A graph in text form has its own dropout, which is set or taken away.
#[test]
fn graphs_have_dropout_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut m = ir::dsl::Model::new();
    [("b", 4), ("d", 8)].iter().for_each(|(name, size)| m.dim(name, *size));
    let x = m.input("x", ir::DType::F32, "b d");
    let w = m.parameter("w", "d", ir::state::Init::Ones);
    let x = m.mul(&[&x, &w]);
    let dropped = ir::composite::dropout(&mut m, &x, 0.5, "x");
    let sum = m.einsum("", &[&dropped, &dropped]);
    let count = m.constant(4.0, ir::DType::F32);
    m.loss(&sum, &count);
    let graph = m.finish().unwrap();
    std::fs::write(folder.path().join("graph"), graph.to_string()).unwrap();
    let trace = |words: &str| expect(folder.path(), &format!("trace @/graph --pass autodiff {words}"), 0);
    assert!(trace("").contains("einsum(2.0)"));
    assert!(trace("--dropout 0.75").contains("einsum(4.0)"));
    for words in ["--dropout 0", "--mode forward"] {
        let said = trace(words);
        assert!(!said.contains("random(") && !said.contains("input row"), "{said}");
    }
    for words in ["", "--dropout 0 --mesh dp=2", "--mesh dp=2 --microbatches 2"] {
        expect(folder.path(), &format!("check @/graph --numeric {words}"), 0);
    }
}
