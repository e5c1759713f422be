//! Small programs in which only the order of messages and collectives matters.

use ir::parse_program;
use ir::program::Program;
use planner::hang::{Fault, Transport, ends};

/// A program of two or more rows without states, from what each row does in its one segment.
fn program(mesh: &str, rows: &[&str]) -> Program {
    let homes: Vec<String> = (0..rows.len()).map(|r| r.to_string()).collect();
    let mut text = format!("program mesh {mesh} microbatches 1\nhomes {}\n", homes.join(" "));
    for (row, body) in rows.iter().enumerate() {
        text += &format!("stage {row} slots 1 sizes 0 0 512 0\n");
        for b in 0..8 {
            let sharding = if b < 6 { "[_]" } else { "[_] partial(pp)" };
            text += &format!("b{b} = f32 4 @ {sharding} slot+{}\n", 64 * b);
        }
        text += &format!("segment {row}F\n");
        body.lines().for_each(|line| text += &format!("  {}\n", line.trim()));
        text += &format!("call {row}F 0 slot 0\n");
    }
    parse_program(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// What is wrong under a transport.
fn said(program: &Program, transport: Transport) -> Vec<String> {
    ends(program, transport).err().into_iter().flatten().map(|f| f.to_string()).collect()
}

fn circle(program: &Program, transport: Transport) -> usize {
    match &ends(program, transport).unwrap_err()[..] {
        [Fault::Circle { waits, .. }] => waits.len(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_both_send_first_wait_for_each_other() {
    let blocking = program(
        "pp=2",
        &[
            "t0 = send v0 0 -> 1 b0
             sent t0 b0
             t1 = receive v1 1 -> 0 b1
             received t1 b1",
            "t0 = send v1 1 -> 0 b0
             sent t0 b0
             t1 = receive v0 0 -> 1 b1
             received t1 b1",
        ],
    );
    let found = said(&blocking, Transport::Rendezvous);
    let needed = "with rendezvous sends 2 rows wait for ever: rank 0 waits in 0F of micro-batch 0 (call 0: sent v0 to \
                  stage 1) for call 0 of rank 1, which waits in 1F of micro-batch 0 (call 0: sent v1 to stage 0) for call \
                  0 of rank 0";
    assert_eq!(found, [needed]);
    assert_eq!(circle(&blocking, Transport::Rendezvous), 2);
    assert_eq!(ends(&blocking, Transport::Eager).unwrap().messages, 2);
    assert!(ends(&blocking, Transport::Grouped).is_ok());
    // What is started together is waited for together.
    let apart = program(
        "pp=2",
        &[
            "t0 = send v0 0 -> 1 b0
             t1 = receive v1 1 -> 0 b1
             sent t0 b0
             received t1 b1",
            "t0 = send v1 1 -> 0 b0
             t1 = receive v0 0 -> 1 b1
             sent t0 b0
             received t1 b1",
        ],
    );
    for transport in [Transport::Rendezvous, Transport::Eager, Transport::Grouped] {
        assert!(ends(&apart, transport).is_ok());
    }
}

#[test]
fn a_group_ends_where_something_else_is_done() {
    let between = |what: &str| {
        let row = |own: usize, other: usize| {
            format!(
                "t0 = send v{own} {own} -> {other} b0\nsent t0 b0\n{what}t1 = receive v{other} {other} -> {own} b1\nreceived t1 b1"
            )
        };
        program("pp=2", &[&row(0, 1), &row(1, 0)])
    };
    assert!(ends(&between(""), Transport::Grouped).is_ok());
    assert_eq!(circle(&between("tap y b2\n"), Transport::Grouped), 2);
    // What is passed on cannot be in the group that it comes with.
    let passed_on = "t0 = receive v1 1 -> 0 b0
                     received t0 b0
                     t1 = send v0 0 -> 1 b0
                     sent t1 b0";
    let waits = "t0 = receive v0 0 -> 1 b0
                 received t0 b0
                 t1 = send v1 1 -> 0 b1
                 sent t1 b1";
    let both = program("pp=2", &[passed_on, waits]);
    assert!(ends(&both, Transport::Grouped).is_ok());
    let own = waits.replace("b1", "b0");
    assert_eq!(circle(&program("pp=2", &[passed_on, &own]), Transport::Grouped), 2);
}

#[test]
fn the_shortest_circle_is_named() {
    // Rows 0 to 3 wait in a circle of four, and rows 2 and 3 for each other.
    let row = |own: usize, to: usize, from: usize| {
        format!(
            "t0 = send v{own} {own} -> {to} b0\nsent t0 b0\nt1 = receive v{from} {from} -> {own} b1\nreceived t1 b1\n"
        )
    };
    let four = [row(0, 1, 3), row(1, 2, 0), row(2, 3, 1), row(3, 0, 2)];
    let four: Vec<&str> = four.iter().map(String::as_str).collect();
    assert_eq!(circle(&program("pp=4", &four), Transport::Rendezvous), 4);
    // A collective waits for everybody, so whoever is stuck makes a circle with it; that of two is named.
    let joint = "t0 = start all_reduce(pp) b6 -> b2\nwait t0\n";
    let stuck = [
        format!("{joint}t1 = send v0 0 -> 1 b0\nsent t1 b0"),
        format!("t1 = receive v0 0 -> 1 b0\nreceived t1 b0\n{joint}"),
        joint.to_string(),
        joint.to_string(),
    ];
    let stuck: Vec<&str> = stuck.iter().map(String::as_str).collect();
    let found = said(&program("pp=4", &stuck), Transport::Eager);
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("with eager sends 4 rows wait for ever: rank 0 waits in 0F"), "{found:?}");
    assert!(found[0].contains("(call 0: all_reduce(pp) of f32 [4] @ [_] partial(pp)) for call 0 of rank 1"));
    assert_eq!(circle(&program("pp=4", &stuck), Transport::Eager), 2);
}

#[test]
fn a_rank_may_wait_for_itself() {
    // Both stages of a turn of a V live in one row.
    let text = |order: [&str; 4]| {
        let text = format!(
            "program mesh pp=1 microbatches 1\nhomes 0 0\nstage 0 slots 1 sizes 0 0 128 0\nb0 = f32 4 @ [_] slot+0\n\
             b1 = f32 4 @ [_] slot+64\nsegment 0F\n{}\ncall 0F 0 slot 0\n",
            order.join("\n")
        );
        parse_program(&text).unwrap()
    };
    let [send, sent, receive, received] =
        ["t0 = send v0 0 -> 1 b0", "sent t0 b0", "t1 = receive v0 0 -> 1 b1", "received t1 b1"];
    assert!(ends(&text([receive, send, sent, received]), Transport::Rendezvous).is_ok());
    let alone = text([send, sent, receive, received]);
    assert_eq!(circle(&alone, Transport::Rendezvous), 1);
    assert!(ends(&alone, Transport::Eager).is_ok());
    assert_eq!(circle(&text([receive, received, send, sent]), Transport::Eager), 1);
}

#[test]
fn rows_must_start_the_same_collectives() {
    let a = "t0 = start all_reduce(pp) b6 -> b2\nwait t0\n";
    let b = "t1 = start all_reduce(pp) b7 -> b3\nwait t1\n";
    let same = program("pp=2", &[&[a, b].concat(), &[b, a].concat()]);
    // The buffers have other numbers, but what is done is the same.
    assert_eq!(ends(&same, Transport::Rendezvous).unwrap().collectives, 2);
    let missing = program("pp=2", &[&[a, b].concat(), a]);
    let needed = "collective 1 over pp: rank 0 in 0F of micro-batch 0 (call 0) does all_reduce(pp) of f32 [4] @ [_] \
                  partial(pp), but rank 1 does nothing more";
    assert_eq!(said(&missing, Transport::Rendezvous), [needed]);
    let other = program("pp=2,dp=2", &[a, &a.replace("(pp)", "(pp.dp)")]);
    assert_eq!(said(&other, Transport::Rendezvous).len(), 2);
    // Within a row all ranks do the same, so only how many meet is counted.
    let inside = program("dp=4,pp=2", &["t0 = start all_gather(dp, dim 0) b0 -> b1\nwait t0", a]);
    assert_eq!(said(&inside, Transport::Rendezvous).len(), 1);
    let inside = program("dp=4,pp=2", &["t0 = start all_gather(dp, dim 0) b0 -> b1\nwait t0", ""]);
    assert_eq!(ends(&inside, Transport::Rendezvous).unwrap().collectives, 1);
}

#[test]
fn messages_must_have_both_ends() {
    let send = "t0 = send v0 0 -> 1 b0\nsent t0 b0";
    let receive = "t0 = receive v0 0 -> 1 b0\nreceived t0 b0";
    let only = |rows: [&str; 2]| said(&program("pp=2", &rows), Transport::Rendezvous);
    assert_eq!(only([send, receive]), [""; 0]);
    let needed =
        "v0 from stage 0 to stage 1, sent by rank 0 in 0F of micro-batch 0 (call 0), is never received";
    assert_eq!(only([send, ""]), [needed]);
    let needed =
        "v0 from stage 0 to stage 1, received by rank 1 in 1F of micro-batch 0 (call 0), is never sent";
    assert_eq!(only(["", receive]), [needed]);
    let unwaited =
        "rank 0 in 0F of micro-batch 0 (call 0) starts v0 from stage 0 to stage 1 and does not wait for it";
    assert_eq!(only(["t0 = send v0 0 -> 1 b0", receive]), [unwaited]);
    let early = "sent t0 b0\nt0 = send v0 0 -> 1 b0";
    let needed = "rank 0 in 0F of micro-batch 0 (call 0) waits for what it did not start for that micro-batch: sent t0";
    assert_eq!(only([early, receive]), [needed, unwaited]);
    let twice = format!("{send}\n{send}");
    let needed = "v0 from stage 0 to stage 1 is there twice for its micro-batch: again by rank 0 in 0F of micro-batch 0 \
                  (call 0)";
    assert_eq!(only([&twice, &format!("{receive}\n{receive}")]), [needed]);
}
