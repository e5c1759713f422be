//! Checkpoints of `meshc train`: a run that is killed at any moment and resumed is the run that nobody disturbed, to the
//! last bit; what one mesh wrote every mesh reads; damage is named and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use meshc_tests::oracle::{Oracle, read};
use meshc_tests::whole::{PLAIN, Split, split_step};
use planner::zero::Zero;
use runtime::checkpoint::{About, Checkpoint, Described, list, write};
use runtime::local::{Local, RunError};
use serde_json::Value;

/// A model whose step takes about a millisecond.
const TINY: &str = r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 31,
 "activation_function": "gelu_new", "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "tie_word_embeddings": false}"#;

/// A folder with a tiny model and token ids.
fn tiny() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), TINY).unwrap();
    let ids: Vec<u16> = (0..4000u32).map(|i| (i * i % 31) as u16).collect();
    runtime::data::npy::write_npy_u16(&folder.path().join("ids.npy"), &ids).unwrap();
    folder
}

/// `meshc train` of the tiny model; words are divided by spaces, and @ is its folder.
fn train(folder: &Path, words: &str) -> Command {
    let words = format!(
        "train @/config.json --data @/ids.npy --seq 8 --global-batch 4 --lr 0.01 --clip 1 --weight-decay 0.1 --warmup 3 {words}"
    )
    .replace('@', &folder.display().to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshc"));
    command.args(words.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(done: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}

#[track_caller]
fn expect(command: &mut Command, status: i32, words: &[&str]) -> String {
    let done = command.output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(status), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    for word in words {
        assert!(text.contains(word), "should say `{word}`, but says: {text}");
    }
    text
}

/// What a run's numbers are, but for the time that they took.
fn curve(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let line = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        format!("{} {} {} {}", row["step"], row["loss"], row["grad_norm"], row["lr"])
    };
    text.lines().map(line).collect()
}

/// All files below a folder, with what is in them.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    all
}

fn steps(dir: &Path) -> Vec<usize> {
    list(dir).unwrap().into_iter().map(|(step, _)| step).collect()
}

/// When a run is killed.
#[derive(Clone, Copy)]
enum Moment {
    /// After so long.
    After(Duration),
    /// As soon as the checkpoint of the step behind so many is being written.
    Writing(usize),
}

/// Kills a run: whether it left a checkpoint half written; nothing if it had ended before.
fn kill(mut child: Child, dir: &Path, moment: Moment) -> Option<bool> {
    let mine = format!(".{}.part", child.id());
    match moment {
        Moment::After(wait) => std::thread::sleep(wait),
        Moment::Writing(nth) => {
            let mut seen = BTreeSet::new();
            while seen.len() <= nth && child.try_wait().unwrap().is_none() {
                seen.extend(names(dir).into_iter().filter(|n| n.ends_with(&mine)));
            }
        }
    }
    let running = child.try_wait().unwrap().is_none();
    // It may end in between; then there is nothing to kill.
    let _ = child.kill();
    child.wait().unwrap();
    running.then(|| names(dir).iter().any(|n| n.ends_with(&mine)))
}

/// What is in a folder; nothing if there is none.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// As many kills as asked for, at moments spread over the whole of a run; each run writes a checkpoint at every step.
#[test]
fn a_killed_run_goes_on_as_if_nothing_had_been() {
    let kills: usize = std::env::var("MESHC_KILLS").map_or(20, |n| n.parse().unwrap());
    let folder = tiny();
    let at = |name: &str| folder.path().join(name);
    let run = at("run");
    let all = 30;
    let mesh = "--mesh dp=2,tp=2 --zero 3 --quiet";
    expect(
        &mut train(folder.path(), &format!("{mesh} --steps {all} --metrics @/whole.jsonl --save @/whole")),
        0,
        &[],
    );
    let (mut killed, mut halves, mut round) = (0, 0, 0);
    let mut wait = Duration::from_millis(150);
    while killed < kills {
        round += 1;
        let _ = std::fs::remove_dir_all(&run);
        let words = format!(
            "{mesh} --steps {all} --checkpoint @/run --every 1 --resume --metrics @/run.jsonl --save @/saved"
        );
        // Killed again and again until it gets to its end.
        for turn in 0.. {
            if killed < kills {
                let at = round * 7919 + turn * 104_729 + killed as u64 * 31_337;
                let moment = match killed % 2 {
                    0 => Moment::After(wait + Duration::from_micros(at % 120_000)),
                    _ => Moment::Writing((at % 9) as usize),
                };
                if let Some(half) = kill(train(folder.path(), &words).spawn().unwrap(), &run, moment) {
                    killed += 1;
                    halves += usize::from(half);
                    continue;
                }
                // It was too quick; the next ones have less time.
                wait = wait * 2 / 3;
            } else {
                expect(&mut train(folder.path(), &words), 0, &[]);
            }
            break;
        }
        assert_eq!(curve(&at("run.jsonl")), curve(&at("whole.jsonl")), "round {round}");
        let model = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
        assert!(model("saved") == model("whole"), "round {round}");
        assert_eq!(steps(&run), [all - 1, all]);
        assert_eq!(names(&run).len(), 2, "something is left over");
    }
    assert!(halves > 0, "no kill was in the middle of a checkpoint");
    println!("{killed} kills in {round} runs, {halves} of them in the middle of a checkpoint");
}

#[test]
fn damage_is_named_and_nothing_is_changed() {
    let folder = tiny();
    let run = folder.path().join("run");
    let words = "--mesh dp=2 --zero 1 --checkpoint @/run --every 2 --keep 3 --quiet";
    expect(&mut train(folder.path(), &format!("{words} --steps 6 --metrics @/m.jsonl")), 0, &[]);
    assert_eq!(steps(&run), [2, 4, 6]);
    type Edit = fn(&mut Vec<u8>);
    let rows: &[(&str, Option<Edit>)] = &[
        ("step-000006/rank-00000.safetensors", Some(|b| b[3] ^= 1)),
        ("step-000006/rank-00000.safetensors", Some(|b| b[100] ^= 64)),
        ("step-000006/rank-00001.safetensors", Some(|b| *b.last_mut().unwrap() ^= 128)),
        ("step-000006/rank-00001.safetensors", Some(|b| b.truncate(b.len() / 2))),
        ("step-000006/rank-00001.safetensors", Some(|b| b.truncate(0))),
        ("step-000006/rank-00001.safetensors", Some(|b| b.push(0))),
        ("step-000006/rank-00000.safetensors", None),
        ("step-000006/config.json", Some(|b| b[20] ^= 1)),
        ("step-000006/config.json", None),
        ("step-000006/index.json", Some(|b| b.truncate(b.len() / 2))),
        ("step-000006/index.json", Some(|b| b.truncate(0))),
        (
            "step-000006/index.json",
            Some(|b| *b = String::from_utf8_lossy(b).replace("\"step\":6", "\"step\":7").into()),
        ),
        ("step-000006/index.json", Some(|b| b[12] ^= 1)),
        ("step-000006/index.json", None),
    ];
    for (name, edit) in rows {
        let path = run.join(name);
        let whole = std::fs::read(&path).unwrap();
        match edit {
            Some(edit) => {
                let mut bytes = whole.clone();
                edit(&mut bytes);
                std::fs::write(&path, bytes).unwrap();
            }
            None => std::fs::remove_file(&path).unwrap(),
        }
        let before = files(folder.path());
        let resume = format!("{words} --steps 9 --resume --metrics @/m.jsonl");
        let advice = format!("step-000004 is whole: remove {}", run.join("step-000006").display());
        expect(&mut train(folder.path(), &resume), 1, &[path.to_str().unwrap(), &advice]);
        let mut export = Command::new(env!("CARGO_BIN_EXE_meshc"));
        export.arg("export").arg(&run).arg("-o").arg(folder.path().join("out"));
        expect(&mut export, 1, &[path.to_str().unwrap()]);
        assert!(files(folder.path()) == before, "{name}");
        std::fs::write(&path, whole).unwrap();
    }
    // The advice works; a killed run may have left half a line, and lines that come again.
    let metrics = std::fs::read_to_string(folder.path().join("m.jsonl")).unwrap();
    std::fs::write(folder.path().join("m.jsonl"), metrics + "{\"step\":6,\"lo").unwrap();
    std::fs::remove_dir_all(run.join("step-000006")).unwrap();
    expect(&mut train(folder.path(), &format!("{words} --steps 9 --resume --metrics @/m.jsonl")), 0, &[]);
    assert_eq!(curve(&folder.path().join("m.jsonl")).len(), 9);
    assert_eq!(steps(&run), [6, 8, 9]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tiny();
    let other = TINY.replace("\"n_embd\": 16", "\"n_embd\": 32");
    std::fs::create_dir(folder.path().join("wide")).unwrap();
    std::fs::write(folder.path().join("wide/config.json"), other).unwrap();
    let deep = TINY.replace("\"n_layer\": 1", "\"n_layer\": 2");
    std::fs::create_dir(folder.path().join("deep")).unwrap();
    std::fs::write(folder.path().join("deep/config.json"), deep).unwrap();
    expect(
        &mut train(folder.path(), "--steps 2 --checkpoint @/run --resume"),
        0,
        &["holds no checkpoint", "starts at step 0"],
    );
    let before = files(folder.path());
    let rows: &[(&str, &[&str])] = &[
        ("--steps 4 --every 2", &["--checkpoint"]),
        ("--steps 4 --resume", &["--checkpoint"]),
        ("--steps 4 --keep 3", &["--checkpoint"]),
        ("--steps 4 --checkpoint @/new --every 0", &["--every 0"]),
        ("--steps 4 --checkpoint @/new --keep 0", &["--keep 0"]),
        ("--steps 4 --checkpoint @/run", &["up to step 2", "--resume"]),
        ("--steps 4 --checkpoint @/run --resume --seed 5", &["--seed 5", "--seed 0"]),
    ];
    for (words, message) in rows {
        expect(&mut train(folder.path(), words), 2, message);
    }
    let models: &[(&str, &[&str])] =
        &[("wide", &["state `transformer.", "16", "32"]), ("deep", &["state `transformer.h.1.", "missing"])];
    for (model, message) in models {
        let words = format!(
            "train @/{model}/config.json --data @/ids.npy --seq 8 --global-batch 4 --steps 4 --checkpoint @/run --resume --metrics @/none.jsonl"
        )
        .replace('@', &folder.path().display().to_string());
        expect(Command::new(env!("CARGO_BIN_EXE_meshc")).args(words.split(' ')), 2, message);
    }
    assert!(files(folder.path()) == before);
    let nothing = "--steps 2 --checkpoint @/run --resume";
    expect(&mut train(folder.path(), nothing), 0, &["is at step 2 of 2: nothing is left to do"]);
    let note = "--steps 3 --checkpoint @/run --resume --min-lr 0.001";
    expect(&mut train(folder.path(), note), 0, &["going on from", "--min-lr was 0 ", "--steps was 2 "]);
}

#[test]
fn an_exported_checkpoint_is_what_a_run_saves() {
    let folder = tiny();
    expect(
        &mut train(folder.path(), "--mesh tp=2 --steps 3 --checkpoint @/run --save @/saved --quiet"),
        0,
        &[],
    );
    let at = |name: &str| folder.path().join(name);
    for (from, to) in [("run", "a"), ("run/step-000003", "b")] {
        let mut export = Command::new(env!("CARGO_BIN_EXE_meshc"));
        let export = export.arg("export").arg(at(from)).arg("-o").arg(at(to));
        expect(export, 0, &["of step 3"]);
        for file in ["config.json", "model.safetensors"] {
            let read = |folder: &str| std::fs::read(at(folder).join(file)).unwrap();
            assert!(read(to) == read("saved"), "{from} {file}");
        }
    }
    std::fs::write(at("run/config.json"), TINY).unwrap();
    let mut export = Command::new(env!("CARGO_BIN_EXE_meshc"));
    expect(export.arg("export").arg(at("run")).arg("-o").arg(at("c")), 2, &["both", "step-000003"]);
}

#[cfg(unix)]
#[test]
fn a_signal_ends_a_run_with_a_checkpoint() {
    let folder = tiny();
    let metrics = folder.path().join("m.jsonl");
    let words = "--mesh dp=2 --steps 2000 --checkpoint @/run --metrics @/m.jsonl --quiet --resume";
    for signal in ["TERM", "INT"] {
        let before = std::fs::read(&metrics).map_or(0, |b| b.len());
        let child = train(folder.path(), words).spawn().unwrap();
        // Its handler is there once it has done a step.
        while std::fs::read(&metrics).map_or(0, |b| b.len()) <= before + 200 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let sent =
            Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let done = child.wait_with_output().unwrap();
        let text = said(&done);
        assert_eq!(done.status.code(), Some(1), "{text}");
        let last = *steps(&folder.path().join("run")).last().unwrap();
        for words in [format!("signal after step {}", last - 1), format!("step-{last:06}")] {
            assert!(text.contains(&words), "{text}");
        }
        assert_eq!(curve(&metrics).len(), last);
    }
    let last = *steps(&folder.path().join("run")).last().unwrap();
    let more = last + 3;
    expect(&mut train(folder.path(), &words.replace("2000", &more.to_string())), 0, &[]);
    assert_eq!(curve(&metrics).len(), more);
}

#[test]
fn the_bench_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let bench = |words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_meshc"));
        command.args(["bench", "checkpoint", "-o"]).arg(folder.path()).args(words.split_whitespace());
        command
    };
    expect(&mut bench("--gb 0.003 --ranks 7 --format json"), 0, &["\"bytes\": 3000000", "\"share\""]);
    expect(&mut bench("--gb 0.003"), 0, &["one plain file", "MB/s"]);
    assert!(names(folder.path()).is_empty());
    expect(&mut bench("--gb 0"), 2, &["--gb 0"]);
    expect(&mut bench("--ranks 0"), 2, &["--ranks 0"]);
}

/// A program of an oracle's training step on a mesh, and its states described.
fn program(oracle: &Oracle, mesh: &str, zero: Zero) -> (Local, Vec<(String, Vec<usize>)>, About) {
    let split = Split { zero, ..PLAIN };
    let (compiled, _) = split_step(oracle, mesh, split, false, &mut |_, _| {});
    let states = &compiled.program.states;
    let (one, _) = split_step(oracle, "", split, false, &mut |_, _| {});
    // On one rank nothing has to be cut for a mesh; what is cut all the same is cut everywhere.
    let shape = |name: &str| one.program.states.iter().find(|s| &*s.name == name).unwrap().shape();
    let about = About {
        step: 5,
        position: 5,
        seed: 0,
        model: "oracle".to_string(),
        settings: BTreeMap::new(),
        states: states.iter().map(|s| Described::of(s, shape(&s.name))).collect(),
        texts: Vec::new(),
    };
    let cuts = states.iter().map(|s| (s.name.to_string(), s.shape())).collect();
    (Local::new(&compiled.program, 2).unwrap(), cuts, about)
}

/// Whatever mesh wrote it, every mesh has the same bits of parameters, moments and step, and so has what it writes.
#[test]
fn every_mesh_takes_up_what_another_left() {
    for case in ["gpt2", "llama"] {
        let oracle = read(case);
        let folder = tempfile::tempdir().unwrap();
        let (mut local, cuts, about) = program(&oracle, "dp=4", Zero::Parameters);
        for (i, (name, cut)) in cuts.iter().enumerate() {
            // No two elements alike, and bits that are no common numbers.
            let strides: Vec<usize> = (0..cut.len()).map(|d| cut[d + 1..].iter().product()).collect();
            let filled = local.fill_bytes::<RunError>(name, &mut |ranges, out| {
                for (k, bytes) in out.chunks_exact_mut(4).enumerate() {
                    let (mut k, mut flat) = (k, 0);
                    for (range, stride) in ranges.iter().zip(&strides).rev() {
                        flat += (range.start + k % range.len()) * stride;
                        k /= range.len();
                    }
                    bytes.copy_from_slice(
                        &((flat as u32).wrapping_mul(2_654_435_761) ^ ((i as u32) << 9)).to_le_bytes(),
                    );
                }
                Ok(())
            });
            filled.unwrap();
        }
        let first = Checkpoint::open(&write(folder.path(), &about, &local.pieces()).unwrap()).unwrap();
        assert!(first.index().files.len() == 4 && about.states.len() > 60, "{case}");
        let meshes = [
            ("", Zero::Off),
            ("dp=2", Zero::Moments),
            ("dp=3", Zero::Gradients),
            ("dp=5", Zero::Parameters),
            ("dp=8", Zero::Parameters),
            ("tp=2", Zero::Off),
            ("tp=4", Zero::Off),
            ("dp=2,tp=4", Zero::Parameters),
            ("pp=2", Zero::Off),
            ("dp=2,pp=4", Zero::Parameters),
            ("pp=2,tp=2", Zero::Off),
        ];
        for (mesh, zero) in meshes {
            let (mut local, cuts, about) = program(&oracle, mesh, zero);
            first.is_of(&about.states).unwrap();
            for (name, cut) in &cuts {
                let filled = local.fill_bytes::<RunError>(name, &mut |ranges, out| {
                    first.read(name, cut, ranges, out).unwrap();
                    Ok(())
                });
                filled.unwrap();
            }
            let other = tempfile::tempdir().unwrap();
            let again = Checkpoint::open(&write(other.path(), &about, &local.pieces()).unwrap()).unwrap();
            for state in &about.states {
                let (want, got) = (first.bytes(&state.name).unwrap(), again.bytes(&state.name).unwrap());
                assert!(want == got && !want.is_empty(), "{case} on `{mesh}`: {}", state.name);
            }
        }
    }
}

/// From dp=4 with everything split to a pipeline, from there to tp=2 (B57) and on to dp=5: the same losses as on one rank, but for the order of sums.
#[test]
fn a_run_goes_on_on_another_mesh() {
    let folder = tiny();
    let run = |mesh: &str, to: &str| {
        let words = format!(
            "{mesh} --steps 16 --every 4 --keep 4 --checkpoint @/{to} --metrics @/{to}.jsonl --resume --quiet"
        );
        expect(&mut train(folder.path(), &words), 0, &[]);
        assert_eq!(steps(&folder.path().join(to)), [4, 8, 12, 16], "{mesh}");
    };
    // As if it had been stopped there.
    let stopped = |step: usize| {
        for (at, path) in list(&folder.path().join("moved")).unwrap() {
            if at > step {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
    };
    run("", "still");
    run("--mesh dp=4 --zero 3", "moved");
    stopped(4);
    run("--mesh pp=2 --schedule zb-h1 --microbatches 2", "moved");
    stopped(8);
    run("--mesh tp=2", "moved");
    stopped(12);
    run("--mesh dp=5 --zero 2", "moved");
    let losses = |name: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
        text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["loss"].as_f64().unwrap()).collect()
    };
    let (moved, still) = (losses("moved.jsonl"), losses("still.jsonl"));
    assert_eq!((moved.len(), still.len()), (16, 16));
    for (step, (a, b)) in moved.iter().zip(&still).enumerate() {
        assert!((a - b).abs() < 2e-5, "step {step}: {a} and {b}");
    }
}
