//! Checkpoints of small programs on many meshes, and what damage to them says.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use ir::parse_program;
use ir::program::Program;

use super::{About, Checkpoint, CheckpointError, Described, clean, list, newest, prune, write};
use crate::local::Local;

/// Six floats, half as many halves that every rank has, and the step; on `n` ranks.
fn program(n: usize) -> Program {
    let text = format!(
        "
program mesh dp={n} microbatches 1
state w : f32 [a=6] parameter(trainable, decays) ones
state h : bf16 [b=3] parameter(trainable, decays) ones
state step : i32 [] step zeros
stage 0 slots 1 sizes 192 0 0 0
b0 = f32 6 @ [dp] state+0 of w
b1 = bf16 3 @ [_] state+64 of h
b2 = i32 () @ [] state+128 of step
"
    );
    parse_program(&text).unwrap()
}

/// The same, on a mesh that cuts the six as 2 x 3 and splits the inner one.
fn cut(n: usize) -> Program {
    let mut text = program(n).to_string();
    text = text.replace("[a=6]", "[a.0=2, a.1=3]").replace("f32 6 @ [dp]", "f32 2x3 @ [_, dp]");
    parse_program(&text).unwrap()
}

/// Bits that no arithmetic would leave alone.
const W: [u32; 6] = [0x7fc0_1234, 0x0000_0001, 0x8000_0000, 0x3f80_0000, 0xff80_0000, 0xffff_ffff];
const H: [u16; 3] = [0x7fc1, 0x0001, 0xff80];

fn bytes_of(state: &str) -> Vec<u8> {
    match state {
        "w" => bytemuck::cast_slice(&W).to_vec(),
        "h" => bytemuck::cast_slice(&H).to_vec(),
        _ => 7i32.to_le_bytes().to_vec(),
    }
}

fn about(program: &Program, step: usize) -> About {
    let shape = |name: &str| match name {
        "w" => vec![6],
        "h" => vec![3],
        _ => vec![],
    };
    About {
        step,
        position: step,
        seed: 3,
        model: "small \"one\"".to_string(),
        settings: BTreeMap::from([("lr".to_string(), "0.001".to_string())]),
        states: program.states.iter().map(|s| Described::of(s, shape(&s.name))).collect(),
        texts: vec![("config.json".to_string(), "{}\n".to_string())],
    }
}

/// A program with the states of a checkpoint.
fn loaded(program: &Program, from: &Checkpoint) -> Local {
    let mut local = Local::new(program, 2).unwrap();
    for state in &program.states {
        let cut = state.shape();
        let fill = local.fill_bytes::<crate::local::RunError>(&state.name, &mut |ranges, out| {
            from.read(&state.name, &cut, ranges, out).unwrap();
            Ok(())
        });
        fill.unwrap();
    }
    local
}

/// A checkpoint of step 7 on four ranks.
fn four(dir: &Path) -> PathBuf {
    let program = program(4);
    let mut local = Local::new(&program, 2).unwrap();
    for state in ["w", "h", "step"] {
        let all = bytes_of(state);
        let fill = local.fill_bytes::<crate::local::RunError>(state, &mut |ranges, out| {
            let start = ranges.first().map_or(0, |r| r.start) * if state == "h" { 2 } else { 4 };
            out.copy_from_slice(&all[start..start + out.len()]);
            Ok(())
        });
        fill.unwrap();
    }
    write(dir, &about(&program, 7), &local.pieces()).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_mesh_reads_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let folder = four(dir.path());
    // Pieces of 2, 2, 2 and 0: the last rank has nothing.
    let files = [
        "config.json",
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    ];
    assert_eq!(names(&folder), files);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!((checkpoint.index().step, checkpoint.index().seed), (7, 3));
    assert_eq!(checkpoint.index().model, "small \"one\"");
    assert_eq!(checkpoint.text("config.json").unwrap().unwrap(), "{}\n");
    let keys: Vec<&str> = checkpoint.index().states["w"].pieces.iter().map(|p| p.key.as_str()).collect();
    assert_eq!(keys, ["w[0:2]", "w[2:4]", "w[4:6]"]);
    for n in [1, 2, 3, 4, 5, 8] {
        for program in [program(n), cut(n)] {
            let about = about(&program, n);
            checkpoint.is_of(&about.states).unwrap();
            let again = tempfile::tempdir().unwrap();
            let folder = write(again.path(), &about, &loaded(&program, &checkpoint).pieces()).unwrap();
            let other = Checkpoint::open(&folder).unwrap();
            for state in ["w", "h", "step"] {
                assert_eq!(other.bytes(state).unwrap(), bytes_of(state), "{state} on {n} ranks");
            }
            assert_eq!(other.whole("h").unwrap().data[1], half::bf16::from_bits(1).to_f32());
            assert!(other.whole("step").is_err());
        }
    }
}

#[test]
fn another_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&four(dir.path())).unwrap();
    let states = about(&program(2), 0).states;
    let edit = |edit: &dyn Fn(&mut Vec<Described>)| {
        let mut states = states.clone();
        edit(&mut states);
        let error = checkpoint.is_of(&states).unwrap_err();
        assert!(error.is_mismatch());
        error.to_string()
    };
    let table = [
        (
            edit(&|s| s[0].shape = vec![2, 3]),
            "state `w` is f32 [6] in the checkpoint, and the model needs f32 [2, 3]",
        ),
        (
            edit(&|s| s[1].dtype = ir::DType::F32),
            "state `h` is bf16 [3] in the checkpoint, and the model needs f32 [3]",
        ),
        (
            edit(&|s| s[1].name = "k".into()),
            "state `k` is missing in the checkpoint, and the model needs bf16 [3]",
        ),
        (
            edit(&|s| drop(s.remove(2))),
            "state `step` is i32 [] in the checkpoint, and the model needs no such state",
        ),
    ];
    for (message, expected) in table {
        assert!(message.ends_with(expected), "{message}");
    }
    let mut out = [0; 8];
    assert!(checkpoint.read("none", &[6], std::slice::from_ref(&(0..2)), &mut out).is_err());
    assert!(checkpoint.read("w", &[7], std::slice::from_ref(&(0..2)), &mut out).is_err());
    assert!(checkpoint.read("w", &[6], std::slice::from_ref(&(5..7)), &mut out).is_err());
    assert!(checkpoint.read("w", &[6], std::slice::from_ref(&(0..3)), &mut out).is_err());
}

/// Every byte of every file, changed; every length, cut short; every file, gone.
#[test]
fn all_damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = four(dir.path());
    for name in names(&folder) {
        let path = folder.join(&name);
        let whole = fs::read(&path).unwrap();
        let expect = |what: &str| {
            let error = Checkpoint::open(&folder).expect_err(what).to_string();
            assert!(error.contains(&path.display().to_string()), "{what} of {name}: {error}");
        };
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, &bytes).unwrap();
            expect(&format!("byte {at}"));
        }
        for length in (0..whole.len()).step_by(7) {
            fs::write(&path, &whole[..length]).unwrap();
            expect(&format!("{length} bytes"));
        }
        fs::write(&path, [&whole[..], b"\n"].concat()).unwrap();
        expect("a byte more");
        fs::remove_file(&path).unwrap();
        expect("nothing");
        fs::write(&path, &whole).unwrap();
        Checkpoint::open(&folder).unwrap();
    }
}

/// An index with a true checksum that lies.
#[test]
fn an_index_that_lies_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = four(dir.path()).join("index.json");
    let text = fs::read_to_string(&path).unwrap();
    let table = [
        ("\"layout\":1", "\"layout\":2", "has the layout 2, and this meshc reads 1"),
        ("\"config.json\":", "\"../config.json\":", "is no name of a file"),
        ("\"f32\"", "\"f31\"", "`f31` is no element type"),
        ("[[2,4]]", "[[4,6]]", "overlaps"),
        ("[[2,4]]", "[[2,3]]", "its pieces have 5 of 6 elements"),
        ("[[2,4]]", "[[2,7]]", "is no piece of [6]"),
        ("\"cut\":[6]", "\"cut\":[7]", "are not the same elements"),
        ("\"key\":\"w[2:4]\"", "\"key\":\"w[2:5]\"", "has no tensor \"w[2:5]\""),
        ("\"f32\"", "\"i32\"", "tensor \"w[0:2]\" is F32 [2], and I32 [2] is needed"),
        ("\"seed\":3", "\"seeds\":3", "seeds"),
    ];
    for (from, to, message) in table {
        let (_, rest) = text.split_once('\n').unwrap();
        assert!(rest.contains(from), "{from}");
        let rest = rest.replacen(from, to, 1);
        let hash = xxhash_rust::xxh3::xxh3_64(rest.as_bytes());
        fs::write(&path, format!("{{\"xxh3\":\"{hash:016x}\",\n{rest}")).unwrap();
        let error = Checkpoint::open(path.parent().unwrap()).unwrap_err().to_string();
        assert!(error.contains(message), "{from} -> {to}: {error}");
    }
}

#[test]
fn the_newest_is_taken_or_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(newest(&dir.path().join("none")).unwrap().is_none());
    let program = program(2);
    let local = Local::new(&program, 1).unwrap();
    for step in [2, 1_000_000, 10] {
        write(dir.path(), &about(&program, step), &local.pieces()).unwrap();
    }
    let again = write(dir.path(), &about(&program, 10), &local.pieces()).unwrap_err().to_string();
    assert!(again.contains("step-000010"), "{again}");
    fs::create_dir(dir.path().join("step-11")).unwrap();
    fs::create_dir_all(dir.path().join(".step-000012.1.part/x")).unwrap();
    let steps = || list(dir.path()).unwrap().into_iter().map(|(s, _)| s).collect::<Vec<_>>();
    assert_eq!(steps(), [2, 10, 1_000_000]);
    assert_eq!(newest(dir.path()).unwrap().unwrap().index().step, 1_000_000);

    fs::write(dir.path().join("step-1000000/rank-00001.safetensors"), "").unwrap();
    fs::remove_file(dir.path().join("step-000010/index.json")).unwrap();
    let before = names(dir.path());
    let error = newest(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Newest { .. }));
    let error = error.to_string();
    for words in ["step-1000000/rank-00001.safetensors", "step-000002 is whole: remove"] {
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(names(dir.path()), before);

    clean(dir.path()).unwrap();
    prune(dir.path(), 2).unwrap();
    assert_eq!(names(dir.path()), ["step-000010", "step-1000000", "step-11"]);
    let error = newest(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no older checkpoint is whole"), "{error}");
}

/// What cannot be written leaves nothing behind.
#[test]
fn a_failure_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(1);
    let local = Local::new(&program, 1).unwrap();
    let mut about = about(&program, 1);
    about.texts = vec![("no/such/folder".to_string(), String::new())];
    let error = write(dir.path(), &about, &local.pieces()).unwrap_err().to_string();
    assert!(error.contains("cannot write") && error.contains("no/such/folder"), "{error}");
    assert!(names(dir.path()).is_empty());
}
