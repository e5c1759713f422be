//! What `meshc plan`, `show`, `check` and `trace` print.

use std::process::Command;

use meshc_tests::oracle;
use serde_json::Value;

fn meshc(args: &[&str]) -> String {
    let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(args).output().unwrap();
    assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn folder(name: &str) -> String {
    oracle::read(name).folder.display().to_string()
}

#[test]
fn plan_as_json_keeps_the_contract() {
    let text = meshc(&["plan", &folder("llama"), "--mesh", "dp=2,tp=2", "--seq", "32", "--format", "json"]);
    let plan: Value = serde_json::from_str(&text).unwrap();
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&plan),
        [
            "model",
            "mesh",
            "ranks",
            "comm",
            "comm_total",
            "bucket_bytes",
            "memory",
            "schedule",
            "time",
            "choices",
            "full_gathers"
        ]
    );
    assert_eq!(
        keys(&plan["comm"][0]),
        [
            "op",
            "axes",
            "group_size",
            "stage",
            "phase",
            "tensor",
            "tensors",
            "count",
            "bytes",
            "wire_bytes",
            "seconds",
            "exposed_seconds"
        ]
    );
    let memory = &plan["memory"]["stages"][0];
    let parts = ["parameters", "gradients", "optimizer", "activations", "temporary"];
    let sum: u64 = parts.iter().map(|k| memory[k].as_u64().unwrap()).sum();
    assert_eq!(memory["peak"].as_u64(), Some(sum));
    // The listed terms are the totals.
    let rows = plan["comm"].as_array().unwrap();
    let product = |r: &Value, k: &str| r["count"].as_f64().unwrap() * r[k].as_f64().unwrap();
    let wire: f64 = rows.iter().map(|r| product(r, "wire_bytes")).sum();
    assert!((wire - plan["comm_total"]["wire_bytes_per_rank"].as_f64().unwrap()).abs() < 1e-6);
    let exposed: f64 = rows.iter().map(|r| product(r, "exposed_seconds")).sum();
    let time = |k: &str| plan["time"][k].as_f64().unwrap();
    assert!((exposed - time("exposed_comm_seconds")).abs() < 1e-12);
    let terms = time("compute_seconds") + time("exposed_comm_seconds") + time("bubble_seconds");
    assert!((terms - time("step_seconds")).abs() < 1e-12);
    assert_eq!(plan["model"]["parameters"].as_u64(), Some(52_832));
    assert_eq!(plan["schedule"]["table"], serde_json::json!([["0F0", "0B0", "0O"]]));
}

#[test]
fn a_plan_file_is_shown_and_checked() {
    let to = tempfile::tempdir().unwrap();
    let file = to.path().join("llama.plan").display().to_string();
    let text = meshc(&["plan", &folder("llama"), "--mesh", "dp=2,tp=2", "--seq", "8", "-o", &file]);
    assert!(text.contains("all_reduce"));
    let shown = meshc(&["show", &file, "--rank", "3", "--stage", "0"]);
    assert!(shown.contains("rank 3 at dp=1,tp=1") && shown.contains("segment 0F"), "{shown}");
    let checked = meshc(&["check", &file, "--numeric"]);
    assert!(checked.lines().all(|l| l.starts_with("ok  ")) && checked.contains("lockstep"), "{checked}");
    // A plan that was tampered with is refused, and the place is named.
    let broken =
        std::fs::read_to_string(&file).unwrap().replacen("start all_reduce(tp)", "start all_reduce(dp)", 1);
    std::fs::write(&file, broken).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(["check", &file]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(
        said.contains("stage 0, segment 0F, instruction") && said.contains("all_reduce(dp) is no move of"),
        "{said}"
    );
}

#[test]
fn check_passes_for_both_models() {
    for model in ["gpt2", "llama"] {
        for mesh in ["", "dp=2", "tp=2", "dp=2,tp=2", "tp=3"] {
            let args =
                ["check", &folder(model), "--mesh", mesh, "--seq", "8", "--global-batch", "4", "--numeric"];
            let text = meshc(&args);
            assert_eq!(text.lines().filter(|l| l.starts_with("ok  ")).count(), 6, "{text}");
        }
    }
}

#[test]
fn two_runs_choose_the_same() {
    for mesh in ["dp=2,tp=4", "tp=3"] {
        let [one, two] =
            [(); 2].map(|()| meshc(&["trace", &folder("gemma2"), "--mesh", mesh, "--seq", "16"]));
        assert_eq!(one, two, "{mesh}");
    }
}

#[test]
fn choices_say_what_else_could_be() {
    let model = folder("llama");
    let text = meshc(&["plan", &model, "--mesh", "dp=2,tp=2", "--seq", "32", "--format", "json"]);
    let plan: Value = serde_json::from_str(&text).unwrap();
    let choices = plan["choices"].as_array().unwrap();
    let down = choices.iter().find(|c| c["tensor"] == "model.layers.1.mlp.down_proj.weight product").unwrap();
    assert_eq!(down["op"], "b s f, d f -> b s d");
    assert_eq!(down["chosen"], "scatter b=dp f=tp");
    let other = down["alternatives"].as_array().unwrap().iter().find(|a| a["strategy"] == "gather b=dp d=tp");
    assert!(other.unwrap()["wire_bytes"].as_f64() > down["wire_bytes"].as_f64());
    assert!(choices.iter().any(|c| c["op"].as_str().unwrap().starts_with("reshard [")));
    let text = meshc(&["plan", &model, "--mesh", "dp=2,tp=2", "--seq", "32", "--explain"]);
    assert!(text.contains("model.layers.*.mlp.down_proj.weight product x4: b s f, d f -> b s d"), "{text}");
    assert!(text.contains("* scatter b=dp f=tp") && text.contains("proved: nothing cheaper"), "{text}");
    let chain = meshc(&["plan", &model, "--mesh", "tp=2", "--explain", "model.layers.0.mlp.up_proj.weight"]);
    assert!(chain.contains("by split f=tp") && chain.contains("by all_gather(tp, dim 1)"), "{chain}");
}

#[test]
fn a_row_is_no_longer_than_the_positions_unless_asked() {
    for (model, tokens) in [("gpt2", "512 tokens"), ("llama", "1,024 tokens")] {
        let text = meshc(&["plan", &folder(model), "--mesh", "dp=2"]);
        assert!(text.contains(tokens), "8 rows of at most 64 learned positions, or of 128: {text}");
    }
}

#[test]
fn trace_prints_each_pass_once() {
    let text = meshc(&["trace", &folder("gpt2"), "--mesh", "dp=2", "--seq", "8"]);
    let names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("after ")).collect();
    assert_eq!(
        names,
        [
            "graph",
            "autodiff",
            "optimizer",
            "untap",
            "precision: unchanged",
            "simplify",
            "recompute: unchanged",
            "atoms",
            "constrain: unchanged",
            "choose",
            "reshard",
            "lower",
            "fuse",
            "chain",
            "assign",
            "last: unchanged",
            "bucket",
            "overlap",
            "place"
        ]
    );
    let one = meshc(&["trace", &folder("gpt2"), "--mesh", "dp=2", "--seq", "8", "--pass", "fuse"]);
    assert!(one.starts_with("after fuse\nprogram mesh dp=2"));
}

#[test]
fn graph_files_are_models_too() {
    let to = tempfile::tempdir().unwrap();
    let traced = meshc(&["trace", &folder("llama"), "--seq", "8", "--pass", "graph"]);
    let file = to.path().join("llama.graph");
    std::fs::write(&file, traced.strip_prefix("after graph\n").unwrap()).unwrap();
    let a = meshc(&["plan", file.to_str().unwrap(), "--mesh", "tp=2", "--format", "json"]);
    let b = meshc(&["plan", &folder("llama"), "--mesh", "tp=2", "--seq", "8", "--format", "json"]);
    assert_eq!(a, b);
}

#[test]
fn plans_of_whole_models() {
    // A cluster whose memory does not depend on the machine that runs the test.
    for (model, mesh) in [("gpt2", "dp=2,tp=2"), ("llama", "tp=4"), ("gemma2", "dp=3")] {
        let text = meshc(&["plan", &folder(model), "--mesh", mesh, "--seq", "32", "--cluster", "h100"]);
        assert!(text.lines().count() <= 40 && text.lines().all(|l| l.chars().count() <= 100), "{text}");
        insta::assert_snapshot!(format!("{model}_{}", mesh.replace([',', '='], "_")), text);
    }
}

/// Tokens and FLOPs are those of the rows that count, in however many micro-batches they come; so are the bytes of gradients
/// that are reduced once.
#[test]
fn a_step_is_the_same_in_micro_batches() {
    let planned = |more: &[&str]| -> Value {
        let all = ["plan", &folder("gpt2"), "--seq", "32", "--format", "json", "--global-batch", "5"];
        serde_json::from_str(&meshc(&[&all[..], more].concat())).unwrap()
    };
    let (one, three) = (planned(&["--mesh", "dp=2"]), planned(&["--mesh", "dp=2", "--microbatches", "3"]));
    assert_eq!(three["model"]["tokens_per_step"], 160);
    for key in ["flops_full", "flops_causal"] {
        let (a, b) = (one["model"][key].as_f64().unwrap(), three["model"][key].as_f64().unwrap());
        assert!((a - b).abs() < 1e-9 * a, "{key}: {a} and {b}");
    }
    assert_eq!(three["schedule"]["table"][0].as_array().unwrap().len(), 7);
    let reduced = |plan: &Value| plan["comm_total"]["by_op"]["all_reduce"]["wire_bytes"].clone();
    assert_eq!(reduced(&three), reduced(&one));
    let each = planned(&["--mesh", "dp=2", "--microbatches", "3", "--sync", "each"]);
    let wire = |plan: &Value| plan["comm_total"]["wire_bytes_per_rank"].as_f64().unwrap();
    assert!(wire(&each) > 2.9 * wire(&three), "{} and {}", wire(&each), wire(&three));
}

/// The textbook's figures: slots of a forward pass, in which part of them a rank works, and transfers of a micro-batch.
#[test]
fn a_schedule_has_its_figures() {
    for (p, m, kind, l, slots, used, transfers) in [
        (4, 8, "gpipe", 1, 11, 8.0 / 11.0, 3),
        (4, 8, "looping", 2, 19, 16.0 / 19.0, 7),
        (2, 4, "looping", 2, 9, 8.0 / 9.0, 3),
    ] {
        let (mesh, m, l) = (format!("pp={p}"), m.to_string(), l.to_string());
        let model = folder("llama_deep");
        let pipe = ["--mesh", &mesh, "--microbatches", &m, "--schedule", kind, "--virtual", &l];
        let text = meshc(&[&["plan", &model, "--seq", "32", "--format", "json"], &pipe[..]].concat());
        let plan: Value = serde_json::from_str(&text).unwrap();
        let s = &plan["schedule"];
        assert_eq!((s["kind"].as_str(), s["stages"].as_u64()), (Some(kind), Some(p)));
        assert_eq!(s["forward_slots"].as_u64(), Some(slots), "{kind}");
        assert_eq!(s["forward_utilization"].as_f64(), Some(used), "{kind}");
        assert_eq!(s["boundary_transfers_per_microbatch"].as_u64(), Some(transfers), "{kind}");
        assert_eq!(plan["memory"]["stages"].as_array().unwrap().len(), p as usize);
        // Terms of the stage that has most to do are the step.
        let time = |k: &str| plan["time"][k].as_f64().unwrap();
        let terms = time("compute_seconds") + time("exposed_comm_seconds") + time("bubble_seconds");
        assert!((terms - time("step_seconds")).abs() < 1e-12, "{kind}");
        let sends =
            plan["comm"].as_array().unwrap().iter().filter(|c| c["op"] == "send" && c["phase"] == "forward");
        let sent: u64 = sends.map(|c| c["count"].as_u64().unwrap()).sum();
        assert_eq!(sent, transfers * m.parse::<u64>().unwrap(), "{kind}");
    }
}

/// A table from a file is run as a kind is; what is wrong in one is said; and a plan of several stages is a file that is
/// shown and checked.
#[test]
fn a_table_of_ones_own_is_as_good() {
    let to = tempfile::tempdir().unwrap();
    let model = folder("llama");
    let file = |name: &str, text: &str| {
        let path = to.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let own = file("own.txt", "0F0 0F1 0B1 0B0 0O\n1F0 1F1 1B1 1B0 1O\n");
    let plan = to.path().join("own.plan").display().to_string();
    let trace = to.path().join("own.json").display().to_string();
    let pipe = ["--mesh", "pp=2", "--microbatches", "2", "--seq", "16", "--schedule"];
    let text = meshc(&[&["plan", &model, "-o", &plan, "--trace", &trace], &pipe[..], &[&own]].concat());
    assert!(text.contains("rank 0 |") && text.contains("send") && text.contains("2 stages"), "{text}");
    let checked = meshc(&["check", &plan]);
    assert!(checked.contains("matched"), "{checked}");
    assert!(meshc(&["show", &plan, "--stage", "1"]).contains("receive"));
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let names: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["name"].as_str()).collect();
    assert!(names.contains(&"1B1") && names.contains(&"0O"), "{names:?}");
    let wrong = file("wrong.txt", "0F0 0B0 0O\n1B0 1F0 1O\n");
    let one = ["--mesh", "pp=2", "--microbatches", "1", "--schedule", &wrong];
    let done = Command::new(env!("CARGO_BIN_EXE_meshc")).arg("plan").arg(&model).args(one).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).to_string();
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("wrong.txt") && said.contains("1B0"), "{said}");
}

/// `auto` is no slower than any kind that fits.
#[test]
fn the_fastest_kind_is_chosen() {
    let model = folder("llama_deep");
    let planned = |kind: &str| {
        let pipe =
            ["--mesh", "pp=2", "--microbatches", "4", "--seq", "16", "--schedule", kind, "--format", "json"];
        serde_json::from_str::<Value>(&meshc(&[&["plan", &model], &pipe[..]].concat())).unwrap()
    };
    let seconds = |plan: &Value| plan["time"]["step_seconds"].as_f64().unwrap();
    let chosen = planned("auto");
    for kind in ["gpipe", "1f1b", "interleaved", "looping", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] {
        let other = planned(kind);
        assert!(seconds(&chosen) <= seconds(&other), "{} and {kind}", chosen["schedule"]["kind"]);
    }
}

/// A plan file is trained as it stands; one that was changed so that the checker refuses it does not start.
#[test]
fn only_a_plan_that_is_proved_is_trained() {
    let to = tempfile::tempdir().unwrap();
    let at = |name: &str| to.path().join(name).display().to_string();
    let (plan, broken, metrics) = (at("own.plan"), at("broken.plan"), at("m.jsonl"));
    let model = folder("llama");
    let sizes = ["--mesh", "pp=2", "--microbatches", "2", "--seq", "32", "--global-batch", "8"];
    meshc(&[&["plan", &model, "-o", &plan], &sizes[..]].concat());
    let batches = format!("{model}/data.safetensors");
    let run = |plan: &str, more: &[&str]| {
        let words = ["train", plan, "--batches", &batches, "--steps", "2", "--metrics", &metrics];
        let done = Command::new(env!("CARGO_BIN_EXE_meshc")).args(words).args(more).output().unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).to_string())
    };
    let (code, said) = run(&plan, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(std::fs::read_to_string(&metrics).unwrap().lines().count(), 2);
    for (more, word) in [(["--lr", "0.1"], "--lr"), (["--mesh", "dp=2"], "split")] {
        let (code, said) = run(&plan, &more);
        assert!(code == Some(2) && said.contains(word), "{said}");
    }
    let filled = at("filled.plan");
    let odd = ["--mesh", "pp=2", "--microbatches", "2", "--seq", "32", "--global-batch", "3"];
    meshc(&[&["plan", &model, "-o", &filled], &odd[..]].concat());
    let forward = at("forward.plan");
    meshc(&[&["plan", &model, "-o", &forward, "--mode", "forward"], &sizes[..]].concat());
    for (plan, word) in [(&filled, "do not count"), (&forward, "no training step")] {
        let (code, said) = run(plan, &[]);
        assert!(code == Some(2) && said.contains(word), "{said}");
    }
    std::fs::remove_file(&metrics).unwrap();
    // Halves that are not of one plan.
    let text = std::fs::read_to_string(&plan).unwrap();
    let fewer = text.replace(" 0F1 0B0 0B1", " 0B0").replace(" 1F1 1B1", "");
    for (changed, word) in [
        (text.replace("sharded mesh pp=2", "sharded mesh dp=2"), "on mesh"),
        (fewer, "micro-batches"),
        (text.replace("\nstages 0 ", "\nstages 7 "), "stage"),
    ] {
        std::fs::write(&broken, changed).unwrap();
        let (code, said) = run(&broken, &[]);
        assert!(code != Some(0) && said.contains(word), "{word}: {said}");
    }
    // A stage that never gets ready for what it needs.
    let post = text.lines().find(|l| l.starts_with("call 1F.post 0")).unwrap();
    std::fs::write(&broken, text.replacen(&format!("{post}\n"), "", 1)).unwrap();
    let (code, said) = run(&broken, &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("1F") && !std::path::Path::new(&metrics).exists(), "{said}");
}
