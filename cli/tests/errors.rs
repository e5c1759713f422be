//! Requests that make no sense: exit 2 and a message that says what is, where, and what would work; runs that fail: exit
//! 1; never a panic, never half a file.

use std::path::Path;
use std::process::{Command, Output};

use meshc_tests::oracle;

fn meshc(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meshc")).args(args).output().unwrap()
}

/// The exit status, and everything that was said.
fn said(args: &[&str]) -> (i32, String) {
    let done = meshc(args);
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    (done.status.code().unwrap_or(-1), text)
}

fn expect(args: &[&str], status: i32, words: &[&str]) {
    let (code, text) = said(args);
    assert_eq!(code, status, "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?} should say `{word}`, but says: {text}");
    }
}

fn folder(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

fn gpt2() -> String {
    oracle::read("gpt2").folder.display().to_string()
}

#[test]
fn what_makes_no_sense_is_refused() {
    let model = gpt2();
    let empty = tempfile::tempdir().unwrap();
    let rows: &[(&[&str], &[&str])] = &[
        (&["plan"], &["MODEL is missing"]),
        (&["plan", empty.path().to_str().unwrap()], &["no config.json", empty.path().to_str().unwrap()]),
        (&["plan", "/nonexistent/model"], &["no config.json", "/nonexistent/model"]),
        (&["plan", &model, "--mesh", "dp=0"], &["axis dp has size `0`"]),
        (
            &["plan", &model, "--mesh", "xp=2"],
            &["no axis `xp`", "dp (batch)", "tp (heads, hidden and vocabulary)"],
        ),
        (&["plan", &model, "--mesh", "dp"], &["name=size"]),
        (&["plan", &model, "--bucket-bytes", "9"], &["--bucket-bytes 9", "on one device"]),
        (&["plan", &model, "--mesh", "pp=2", "--bucket-bytes", "9"], &["--bucket-bytes 9", "one a stage"]),
        (
            &["plan", &model, "--mesh", "dp=2", "--mode", "forward", "--bucket-bytes", "9"],
            &["--bucket-bytes 9", "only with --zero 3"],
        ),
        (&["plan", &model, "--mesh", "dp=2,dp=2"], &["axis dp is named twice"]),
        (&["plan", &model, "--mesch", "dp=2"], &["--mesch", "--mesh"]),
        (&["plan", &model, "--mesh", "cp=2"], &["axis cp (sequence)", "not built yet"]),
        (&["plan", &model, "--mesh", "pp=2.2"], &["axis pp0", "called pp"]),
        (&["plan", &model, "--mesh", "pp=2", "--stages", "18446744073709551615,_"], &["the model has"]),
        (
            &["plan", &model, "--mesh", "pp=2", "--schedule", "looping", "--virtual", "1000000"],
            &["--virtual 1000000", "places to cut"],
        ),
        (
            &["plan", &model, "--mesh", "pp=2", "--schedule", "2f2b"],
            &["--schedule 2f2b", "no such kind", "zb-h1"],
        ),
        (
            &["plan", &model, "--mesh", "pp=2", "--schedule", "1f1b", "--virtual", "2"],
            &["1f1b", "--virtual 1", "interleaved"],
        ),
        (
            &["plan", &model, "--mesh", "pp=2", "--schedule", "zb-v", "--virtual", "3"],
            &["zb-v", "--virtual 2"],
        ),
        (&["plan", &model, "--mesh", "pp=2", "--group", "2"], &["1f1b", "--group 2"]),
        (&["plan", &model, "--mesh", "pp=2", "--stages", "4"], &["--stages 4: 1 stages", "2", "pp=2"]),
        (
            &["plan", &model, "--mesh", "pp=2", "--stages", "3,3"],
            &["--stages 3,3: 6 layers", "the model has"],
        ),
        (&["plan", &model, "--mesh", "pp=2", "--stages", "3,x"], &["--stages 3,x: `x` is no number", "`_`"]),
        (&["plan", &model, "--zero", "4"], &["--zero", "0..=3"]),
        (&["plan", &model, "--sync", "never"], &["--sync", "once", "each"]),
        (&["plan", &model, "--dtype", "f16"], &["--dtype", "f32", "bf16"]),
        (&["plan", &model, "--grad-dtype", "bf16"], &["--grad-dtype bf16 needs --dtype bf16"]),
        (&["plan", &model, "--cluster", "tpu"], &["no cluster `tpu`", "h100", "here"]),
        (&["plan", &model, "--mesh", "dp=2", "--cluster", "h100:1"], &["2 ranks", "1 devices"]),
        (&["plan", &model, "--seq", "65"], &["65 tokens", "64 positions"]),
        (&["plan", &model, "--global-batch", "0"], &["--global-batch 0"]),
        (&["plan", &model, "--mode", "decode"], &["not built yet"]),
        (&["generate", &model, "--prompt-ids", "1"], &["`meshc generate`", "not built yet"]),
        (&["search", &model, "--cluster", "h100:8"], &["`meshc search`", "not built yet"]),
        (&["frobnicate"], &["frobnicate"]),
        (&["train", &model, "--seq", "32"], &["nothing to train on", "--data", "--batches"]),
        (&["train", &model, "--seq", "32", "--data", "/nonexistent.npy"], &["/nonexistent.npy"]),
        (&["train", &model, "--backend", "cuda"], &["--backend cuda", "not built yet"]),
        (&["train", &model, "--betas", "0.9"], &["--betas 0.9", "two numbers"]),
        (&["train", &model, "--steps", "0"], &["--steps 0"]),
        (&["show", "/nonexistent.plan"], &["/nonexistent.plan"]),
        (&["show", &format!("{model}/config.json")], &["no plan file", "meshc plan 1"]),
        (&["trace", &model, "--seq", "32", "--pass", "fold"], &["no pass `fold`", "autodiff", "fuse"]),
        (&["export", &model, "-o", "x", "--dtype", "f8"], &["--dtype f8"]),
    ];
    for (args, words) in rows {
        expect(args, 2, words);
    }
}

#[test]
fn a_config_says_what_in_it_is_wrong() {
    let config = |edit: fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let text = std::fs::read_to_string(Path::new(&gpt2()).join("config.json")).unwrap();
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        edit(value.as_object_mut().unwrap());
        folder(&value.to_string())
    };
    let rows: [(tempfile::TempDir, &[&str]); 9] = [
        (folder("{"), &["is no config"]),
        (folder("[]"), &["holds no object"]),
        (
            config(|c| drop(c.insert("model_type".into(), "bert".into()))),
            &["model_type `bert`", "gpt2", "llama"],
        ),
        (config(|c| drop(c.remove("n_embd"))), &["lacks `n_embd`", "gpt2"]),
        (config(|c| drop(c.insert("n_head".into(), 5.into()))), &["`n_head` is 5", "divisor of n_embd, 32"]),
        (config(|c| drop(c.insert("n_layer".into(), (-1).into()))), &["`n_layer` is -1", "at least 1"]),
        (config(|c| drop(c.insert("activation_function".into(), "gelu".into()))), &["`gelu`", "gelu_new"]),
        (
            config(|c| drop(c.insert("embd_pdrop".into(), (-0.1).into()))),
            &["`embd_pdrop` is -0.1", "from 0 to below 1"],
        ),
        (config(|c| drop(c.insert("sliding_window".into(), 7.into()))), &["`sliding_window` is 7", "gpt2"]),
    ];
    for (folder, words) in &rows {
        expect(&["plan", folder.path().to_str().unwrap(), "--seq", "32"], 2, words);
    }
}

/// A copy of the model whose weights were changed by `edit`.
fn with_weights(edit: impl Fn(&mut Vec<u8>)) -> tempfile::TempDir {
    let from = oracle::read("gpt2").folder;
    let to = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    edit(&mut bytes);
    std::fs::write(to.path().join("model.safetensors"), bytes).unwrap();
    to
}

/// Changes the header of a safetensors file as text.
fn header(bytes: &mut Vec<u8>, edit: impl Fn(String) -> String) {
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = edit(String::from_utf8(bytes[8..8 + n].to_vec()).unwrap());
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out.extend(&bytes[8 + n..]);
    *bytes = out;
}

#[test]
fn lying_weights_are_found_before_a_step() {
    let rows: [(tempfile::TempDir, &[&str]); 7] = [
        (with_weights(|b| b.truncate(5)), &["model.safetensors"]),
        (with_weights(|b| b.truncate(b.len() / 2)), &["model.safetensors"]),
        (with_weights(|b| b[..8].copy_from_slice(&(1u64 << 60).to_le_bytes())), &["model.safetensors"]),
        (
            with_weights(|b| {
                header(b, |t| t.replace("\"transformer.wpe.weight\"", "\"transformer.wpe.other\""))
            }),
            &["transformer.wpe.weight"],
        ),
        (
            with_weights(|b| header(b, |t| t.replacen("[64,32]", "[32,64]", 1))),
            &["transformer.wpe.weight", "[64, 32]", "[32, 64]"],
        ),
        (with_weights(|b| header(b, |t| t.replacen("[0,", "[900000000,", 1))), &["model.safetensors"]),
        (with_weights(|b| header(b, |t| t.replace("\"F32\"", "\"I32\""))), &["model.safetensors", "I32"]),
    ];
    let data = oracle::read("gpt2").folder.join("data.safetensors");
    for (folder, words) in &rows {
        let out = folder.path().join("out");
        let args =
            ["train", folder.path().to_str().unwrap(), "--batches", data.to_str().unwrap(), "--steps", "1"];
        let args: Vec<&str> = args.into_iter().chain(["--save", out.to_str().unwrap()]).collect();
        expect(&args, 2, words);
        assert!(!out.join("model.safetensors").exists());
    }
}

/// Batches of 2 steps, 2 rows of 8, every id `id` and the last label `label`.
fn batches(path: &Path, id: i64, label: i64) {
    let inputs = vec![id; 32];
    let mut labels = vec![1i64; 32];
    labels[31] = label;
    let bytes = |v: &[i64]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (inputs, labels) = (bytes(&inputs), bytes(&labels));
    let view =
        |data| safetensors::tensor::TensorView::new(safetensors::Dtype::I64, vec![2, 2, 8], data).unwrap();
    let views = [("inputs", view(&inputs)), ("labels", view(&labels))];
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn data_that_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("b.safetensors");
    let model = gpt2();
    let train = |extra: &[&str]| {
        let args = ["train", &model, "--batches", file.to_str().unwrap(), "--quiet", "--steps"];
        let steps: &[&str] = if extra.first() == Some(&"3") { &[] } else { &["2"] };
        said(&[&args, steps, extra].concat())
    };
    batches(&file, 103, 1);
    let (code, text) = train(&[]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("103") && text.contains("inputs"), "{text}");
    batches(&file, 1, 103);
    let (code, text) = train(&[]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("labels") && text.contains("step 1"), "{text}");
    batches(&file, 1, -100);
    assert_eq!(train(&[]).0, 0);
    let (code, text) = train(&["3"]);
    assert!(code == 2 && text.contains("2 steps"), "{text}");
    let (code, text) = train(&["--global-batch", "3"]);
    assert!(code == 2 && text.contains("batches have 2"), "{text}");
    std::fs::write(&file, b"short").unwrap();
    assert_eq!(train(&[]).0, 2);
}

#[test]
fn a_loss_that_is_not_finite_stops_with_its_first_cause() {
    let poisoned = with_weights(|b| {
        let n = b.len();
        // The last tensor of the file is wte; its first row gets a NaN.
        b[n - 103 * 32 * 4..n - 103 * 32 * 4 + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let out = poisoned.path().join("out");
    let data = poisoned.path().join("b.safetensors");
    batches(&data, 0, 1);
    for mesh in ["", "dp=2", "tp=2"] {
        let args =
            ["train", poisoned.path().to_str().unwrap(), "--mesh", mesh, "--batches", data.to_str().unwrap()];
        let args: Vec<&str> =
            args.into_iter().chain(["--steps", "2", "--quiet", "--save", out.to_str().unwrap()]).collect();
        expect(&args, 1, &["step 0", "loss is not finite", "the first value", "NaN"]);
        assert!(!out.join("model.safetensors").exists());
    }
}

#[test]
fn what_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let blocker = folder.path().join("file");
    std::fs::write(&blocker, "x").unwrap();
    let data = folder.path().join("b.safetensors");
    batches(&data, 1, 1);
    let model = gpt2();
    let inside = blocker.join("out").display().to_string();
    let train = ["train", &model, "--batches", data.to_str().unwrap(), "--steps", "1", "--quiet"];
    for flag in ["--save", "--dump", "--metrics", "--checkpoint"] {
        let args: Vec<&str> = train.into_iter().chain([flag, &inside]).collect();
        expect(&args, 1, &[&inside]);
    }
    expect(&["plan", &model, "--seq", "32", "-o", &inside], 1, &[&inside]);
    expect(&["export", &model, "-o", &inside], 1, &[&inside]);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn rules_that_cannot_be_kept_name_both_places() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("my.rules");
    let llama = oracle::read("llama").folder.display().to_string();
    let rows: &[(&str, &[&str])] = &[
        ("f = tp\nq = tp", &["my.rules:2", "dimension `q`", "kv"]),
        ("f = tp\n\nf = dp", &["my.rules:3: `f = dp`", "my.rules:1 says `f = tp`"]),
        ("f = xp", &["my.rules:1", "axis `xp`", "dp=2,tp=2", "tp"]),
        (
            "d = tp",
            &[
                "axis tp would split two dimensions of model.embed_tokens.weight",
                "v by convention",
                "d by ",
                "my.rules:1",
            ],
        ),
        ("d = tp\nv = tp", &["v by ", "my.rules:2", "d by ", "my.rules:1"]),
        ("lm_head.weights: v = tp", &["my.rules:1", "like `lm_head.weights`", "inputs"]),
        ("lm_head.weight: f = tp", &["my.rules:1", "tensor like `lm_head.weight`", "d, v"]),
        // 101 words over 2 ranks.
        (
            "v = tp even",
            &["my.rules:1", "dimension v of", "size 101", "tp=2", "uneven pieces (51, 50)", "`_`"],
        ),
        ("f tp", &["my.rules:1: `f tp` is no rule"]),
    ];
    for (text, words) in rows {
        std::fs::write(&file, text).unwrap();
        let args = ["plan", &llama, "--mesh", "dp=2,tp=2", "--seq", "8", "--rules", file.to_str().unwrap()];
        expect(&args, 2, words);
    }
    // Rules that can be kept: the vocabulary whole, one layer's inner width whole too; the same numbers.
    std::fs::write(&file, "v = _ ; no axis\nmodel.layers.1.*: f = _\n").unwrap();
    let args = ["check", &llama, "--mesh", "tp=2", "--seq", "8", "--global-batch", "2", "--numeric"];
    let args: Vec<&str> = args.into_iter().chain(["--rules", file.to_str().unwrap()]).collect();
    expect(&args, 0, &["equal one device"]);
    let trace = [
        "trace",
        &llama,
        "--mesh",
        "tp=2",
        "--seq",
        "8",
        "--pass",
        "choose",
        "--rules",
        file.to_str().unwrap(),
    ];
    expect(&trace, 0, &["place lm_head.weight [_, _]", "place model.layers.1.mlp.up_proj.weight [_, _]"]);
}

#[test]
fn constraints_that_cannot_be_kept_name_both_places() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.graph");
    let graph = "graph
input x : f32 [a=5, b=4]
v0 = input(x) : -> a b : f32 5x4 micro | 0 forward
v1 = exp v0 : a b -> a b : f32 5x4 micro | 0 forward
tap(y) v1 : a b -> | 0 forward
";
    let rows: &[(&str, i32, &[&str])] = &[
        ("constrain v1 [tp, _]", 0, &["all_"]),
        (
            "constrain v1 [tp, _]\nconstrain v1 [_, tp]",
            2,
            &["line 7", "contradicts line 6", "[_, tp]", "[tp, _]"],
        ),
        ("constrain v1 [tp, tp]", 2, &["constrain v1", "axis tp twice"]),
        ("constrain v1 [tp]", 2, &["constrain v1", "2 dimensions", "constraint has 1"]),
        ("constrain v1 [xp, _]", 2, &["line 6", "axis xp"]),
        // B12: 5 over 2, equal pieces asked for.
        (
            "constrain v1 [tp, _] even",
            2,
            &["line 6", "dimension 0 of v1 has size 5", "tp=2", "(3, 2)", "dp=2 (3, 2)"],
        ),
        ("constrain v1 [_, tp] even", 0, &["x on mesh dp=2,tp=2"]),
        ("constrain v9 [tp, _]", 2, &["line 6", "v9 is not defined"]),
    ];
    for (lines, status, words) in rows {
        std::fs::write(&file, format!("{graph}{lines}\n")).unwrap();
        expect(&["plan", file.to_str().unwrap(), "--mesh", "dp=2,tp=2", "--mode", "forward"], *status, words);
    }
}
