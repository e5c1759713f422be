//! `meshc train` against what one device computes: loss, norm and rate of every step, logits and gradients of the first,
//! parameters after the last, on every mesh; and the same bits on every run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use meshc_tests::oracle::{Oracle, read, tensors};
use meshc_tests::whole::{MESHES, MODELS};
use serde_json::Value;

/// Runs the case's training into a folder.
fn train(oracle: &Oracle, mesh: &str, to: &Path) {
    let (o, s) = (&oracle.case["optimizer"], &oracle.case["schedule"]);
    let path = |name: &str| to.join(name).display().to_string();
    let folder = oracle.folder.display();
    let words = format!(
        "train|{folder}|--mesh|{mesh}|--batches|{folder}/data.safetensors|--steps|{}|--lr|{}|--min-lr|{}|--warmup|{}|--betas|{},{}|--eps|{}|--weight-decay|{}|--clip|{}|--metrics|{}|--dump|{}|--save|{}|--quiet",
        s["steps"],
        s["lr"],
        s["min_lr"],
        s["warmup_steps"],
        o["betas"][0],
        o["betas"][1],
        o["eps"],
        o["weight_decay"],
        o["clip_global_norm"],
        path("metrics.jsonl"),
        path("dump"),
        path("saved"),
    );
    let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(words.split('|')).output().unwrap();
    assert!(done.status.success(), "{mesh}: {}", String::from_utf8_lossy(&done.stderr));
}

fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// The largest difference, and its root mean square, leaving out elements whose first gradient is only rounding.
fn distance(got: &[f64], want: &[f64], first: Option<&Vec<f64>>) -> (f64, f64) {
    let (mut worst, mut total) = (0.0f64, 0.0);
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        if first.is_some_and(|f| f[i].abs() < 1e-12) {
            continue;
        }
        let d = (a - b).abs();
        let d = if d.is_nan() { f64::INFINITY } else { d };
        worst = worst.max(d);
        total += d * d;
    }
    (worst, (total / want.len().max(1) as f64).sqrt())
}

/// Whether a number is too far away, or none.
fn off(got: f64, want: f64, limit: f64) -> bool {
    got.is_nan() || (got - want).abs() > limit
}

/// f32 against f64: losses to 2e-5, logits to 5e-5, gradients to 2e-4 of their largest; AdamW magnifies rounding where a
/// gradient is near 0, so parameters to 2e-3 at most and 5e-5 on the mean.
fn check(oracle: &Oracle, folder: &Path) -> Vec<String> {
    let mut bad = Vec::new();
    let rows = metrics(folder);
    let lists = [("loss", "loss_per_step"), ("grad_norm", "grad_norm_per_step")];
    for (key, list) in lists {
        for (row, want) in rows.iter().zip(oracle.numbers(list)) {
            let got = row[key].as_f64().unwrap_or(f64::NAN);
            let limit = if key == "loss" { 2e-5 } else { 2e-4 * want };
            if off(got, want, limit) {
                bad.push(format!("step {} {key}: {got}, wanted {want}", row["step"]));
            }
        }
    }
    for (row, want) in rows.iter().zip(oracle.case["schedule"]["lr_per_step"].as_array().unwrap()) {
        let (got, want) = (row["lr"].as_f64().unwrap_or(f64::NAN), want.as_f64().unwrap());
        if off(got, want, 1e-9 + 1e-6 * want) {
            bad.push(format!("step {} lr: {got}, wanted {want}", row["step"]));
        }
    }
    let dump: Tensors = tensors(&folder.join("dump/step-0.safetensors"));
    let saved: Tensors = tensors(&folder.join("saved/model.safetensors"));
    for (name, (shape, want)) in oracle.expected.iter().filter(|(n, _)| *n != "generated") {
        let (of, key) = match name.strip_prefix("final.") {
            Some(key) => (&saved, key),
            None => (&dump, name.as_str()),
        };
        let Some((found, got)) = of.get(key) else {
            bad.push(format!("{name} is missing"));
            continue;
        };
        let first = oracle.expected.get(&format!("grad.{key}")).map(|(_, f)| f);
        let (worst, rms) = distance(got, want, first.filter(|_| name.starts_with("final.")));
        let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let fine = match name.split('.').next() {
            Some("final") => worst <= 2e-3 && rms <= 5e-5,
            Some("grad") => worst <= 2e-6 + 2e-4 * scale,
            Some(_) | None => worst <= 5e-5,
        };
        if found != shape || !fine {
            bad.push(format!("{name}: off by {worst:.1e} at most, {rms:.1e} on the mean"));
        }
    }
    bad
}

#[test]
fn every_mesh_trains_as_one_device_does() {
    for case in MODELS {
        let oracle = read(case);
        for mesh in MESHES {
            let folder = tempfile::tempdir().unwrap();
            train(&oracle, mesh, folder.path());
            let bad = check(&oracle, folder.path());
            assert!(bad.is_empty(), "{case} on `{mesh}`:\n{}", bad.join("\n"));
            assert_eq!(metrics(folder.path()).len(), oracle.numbers("loss_per_step").len());
        }
    }
}

#[test]
fn the_check_sees_another_models_numbers() {
    let folder = tempfile::tempdir().unwrap();
    train(&read("llama_masked"), "dp=2", folder.path());
    let mut other = read("llama_masked");
    other.case["loss_per_step"][1] = Value::from(1.0);
    for (_, data) in other.expected.values_mut() {
        data[0] += 1e-2;
    }
    let bad = check(&other, folder.path());
    assert!(bad.len() > other.expected.len() / 2, "{bad:?}");
}

#[test]
fn two_runs_give_the_same_bits() {
    for (case, mesh) in [("gpt2", "dp=2,tp=2"), ("llama", "tp=2"), ("llama_masked", "dp=4")] {
        let oracle = read(case);
        let runs: Vec<(Vec<u8>, Vec<String>)> = (0..2)
            .map(|_| {
                let folder = tempfile::tempdir().unwrap();
                train(&oracle, mesh, folder.path());
                let losses =
                    metrics(folder.path()).into_iter().map(|r| format!("{} {}", r["loss"], r["grad_norm"]));
                let model: PathBuf = folder.path().join("saved/model.safetensors");
                (std::fs::read(model).unwrap(), losses.collect())
            })
            .collect();
        assert!(runs[0] == runs[1], "{case} on {mesh}");
    }
}

#[test]
fn saved_weights_are_where_training_goes_on() {
    let oracle = read("gpt2");
    let folder = tempfile::tempdir().unwrap();
    train(&oracle, "tp=2", folder.path());
    let saved = folder.path().join("saved");
    let exported = folder.path().join("exported");
    let run = |args: &[&str]| {
        let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(args).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    run(&["export", saved.to_str().unwrap(), "-o", exported.to_str().unwrap()]);
    assert_eq!(tensors(&saved.join("model.safetensors")), tensors(&exported.join("model.safetensors")));
    let keys = |f: &Path| -> Value {
        serde_json::from_str(&std::fs::read_to_string(f.join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(keys(&oracle.folder), keys(&exported));
}

/// B50: initial weights are those of the seed, whatever the mesh.
#[test]
fn initial_weights_do_not_depend_on_the_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let oracle = read("gemma2");
    // The config alone: no weights are read.
    let config = folder.path().join("config.json");
    std::fs::copy(oracle.folder.join("config.json"), &config).unwrap();
    let data = oracle.folder.join("data.safetensors");
    let save = |mesh: &str, seed: &str| {
        let to = folder.path().join(format!("{mesh}-{seed}"));
        // A rate of 0 leaves the weights as they started.
        let args = [
            "train",
            config.to_str().unwrap(),
            "--batches",
            data.to_str().unwrap(),
            "--steps",
            "1",
            "--quiet",
        ];
        let more = ["--lr", "0", "--mesh", mesh, "--seed", seed, "--save", to.to_str().unwrap()];
        let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(args).args(more).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::read(to.join("model.safetensors")).unwrap()
    };
    let one = save("", "7");
    for mesh in ["dp=2", "tp=2", "tp=4", "tp=3,dp=2"] {
        assert!(save(mesh, "7") == one, "{mesh}");
    }
    assert!(save("tp=2", "8") != one);
}
