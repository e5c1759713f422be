//! `meshc bench step`: what it prints, not how fast it is.

use std::process::Command;

use meshc_tests::oracle;
use serde_json::Value;

fn bench(words: &[&str]) -> (i32, String, String) {
    let folder = oracle::read("gpt2").folder.display().to_string();
    let small = ["--seq", "8", "--global-batch", "4", "--steps", "1"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshc"));
    let done = command.args(["bench", "step", &folder]).args(small).args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (done.status.code().unwrap_or(-1), text(&done.stdout), text(&done.stderr))
}

#[test]
fn steps_of_two_splits_are_run_in_turn() {
    let other = "--mesh dp=4 --zero 3 --seq 8 --global-batch 4";
    let (code, text, errors) = bench(&["--mesh", "dp=2", "--beside", other, "--format", "json"]);
    assert_eq!(code, 0, "{errors}");
    let measured: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((measured["ranks"].as_u64(), measured["beside"]["flags"].as_str()), (Some(2), Some(other)));
    let medians: Vec<f64> = measured["beside"]["median_seconds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect();
    // As far as numbers printed and read are the same.
    let ratio = measured["beside"]["ratio"].as_f64().unwrap();
    assert!((ratio * medians[1] / medians[0] - 1.0).abs() < 1e-12, "{ratio} of {medians:?}");
    let (code, text, _) = bench(&["--mesh", "dp=2", "--beside", other]);
    assert!(code == 0 && text.contains("medians, in turn: ") && text.contains("ratio "), "{text}");
    let (_, alone, _) = bench(&["--format", "json"]);
    assert!(serde_json::from_str::<Value>(&alone).unwrap().get("beside").is_none());
}

#[test]
fn another_split_that_makes_no_sense_is_refused() {
    for (flags, words) in [
        ("--zero 7", "--beside \"--zero 7\": invalid value"),
        ("--mesh zz=2", "there is no axis `zz`"),
        ("--stepz 3", "unexpected argument"),
    ] {
        let (code, _, errors) = bench(&["--beside", flags]);
        assert!(code == 2 && errors.contains(words), "{flags}: {code}, {errors}");
    }
}

#[test]
fn a_profile_says_where_the_time_goes() {
    let (code, text, errors) = bench(&["--mesh", "dp=2", "--profile"]);
    assert_eq!(code, 0, "{errors}");
    for words in
        ["time of 1 step on ", "  product ", "  map ", "  all_reduce ", "  waiting ", "slowest instructions"]
    {
        assert!(text.contains(words), "no {words}: {text}");
    }
    // Layers that do the same are one line.
    assert!(text.contains(" alike "), "{text}");
    let shares = text.lines().take_while(|l| !l.contains("slowest")).filter_map(|l| l.split_once(" %"));
    let share = |before: &str| before.split_whitespace().last().and_then(|x| x.parse::<f64>().ok());
    let whole: f64 = shares
        .filter(|(_, after)| !after.contains("cores") && !after.contains("that"))
        .filter_map(|(before, _)| share(before))
        .sum();
    assert!((whole - 100.0).abs() < 1.0, "{whole} %: {text}");
}

#[test]
fn collectives_have_the_columns_of_nccl_tests() {
    let run = |words: &[&str]| {
        let done =
            Command::new(env!("CARGO_BIN_EXE_meshc")).args(["bench", "collectives"]).args(words).output();
        let done = done.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (done.status.code(), text(&done.stdout), text(&done.stderr))
    };
    let small = ["--ranks", "4", "-b", "1000", "-e", "16000", "-f", "4", "-n", "2"];
    let (code, text, errors) = run(&small);
    assert_eq!(code, Some(0), "{errors}");
    let lines: Vec<Vec<&str>> =
        text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
    // 1000, 4000 and 16000 bytes of four collectives: size, count, type, redop, root, time, two rates, wrong, of a copy.
    assert_eq!(lines.len(), 12, "{text}");
    assert!(lines.iter().all(|l| l.len() == 10 && l[2] == "float" && l[4] == "-1"), "{text}");
    let (code, text, _) = run(&[&small[..], &["--format", "json"]].concat());
    assert_eq!(code, Some(0));
    let measured: Value = serde_json::from_str(&text).unwrap();
    let number = |l: &Value, key: &str| l[key].as_f64().unwrap();
    for l in measured["lines"].as_array().unwrap() {
        let of = match l["collective"].as_str().unwrap() {
            "all_reduce" => 2.0,
            _ => 1.0,
        };
        let bus = number(l, "algbw") * of * 3.0 / 4.0;
        assert!((number(l, "busbw") / bus - 1.0).abs() < 1e-9, "{l}");
        let time = number(l, "bytes") / number(l, "algbw") * 1e-3;
        assert!((number(l, "microseconds") / time - 1.0).abs() < 1e-9, "{l}");
    }
    for wrong in [&["--ranks", "1"][..], &["-b", "0"], &["-b", "9", "-e", "8"], &["-f", "1"]] {
        assert_eq!(run(wrong).0, Some(2), "{wrong:?}");
    }
}
