//! The times of a table's actions, from those of the calls that run them.

use ir::program::{Duty, Program};
use ir::schedule::simulate::{Span, Times};
use ir::schedule::{Kind, Schedule};

use super::Timeline;

/// When each action of the table runs. A whole backward in two segments runs from the start of the first to the end of the
/// second; the optimizer of a row runs once, at its last one.
pub fn times(program: &Program, schedule: &Schedule, timeline: &Timeline) -> Times {
    let row = |(r, actions): (usize, &Vec<ir::schedule::Action>)| {
        let stage = &program.stages[r];
        let work = |call: usize| {
            let call = stage.calls[call];
            let segment = &stage.segments[call.segment];
            (segment.stage, segment.kind, call.microbatch, segment.duty)
        };
        let mut spans = timeline.rows[r].spans.iter().filter(|s| {
            let (_, kind, _, duty) = work(s.call);
            duty == Duty::Work && kind != Kind::Begin
        });
        let mut next = spans.next();
        let last = actions.iter().rposition(|a| a.kind == Kind::Optimizer);
        let mut now = 0.0;
        let of = |(i, action): (usize, &ir::schedule::Action)| {
            let mut span: Option<Span> = None;
            while let Some(call) = next {
                let (stage, kind, microbatch, _) = work(call.call);
                let mine = match action.kind {
                    Kind::Optimizer => kind == Kind::Optimizer && Some(i) == last,
                    Kind::Backward => {
                        let half = matches!(kind, Kind::Backward | Kind::Input | Kind::Weight);
                        half && (stage, microbatch) == (action.stage, action.microbatch)
                    }
                    Kind::Begin
                    | Kind::Forward
                    | Kind::Input
                    | Kind::Weight
                    | Kind::Unshard
                    | Kind::Drop
                    | Kind::Reduce => {
                        (stage, kind, microbatch) == (action.stage, action.kind, action.microbatch)
                    }
                };
                if !mine {
                    break;
                }
                span = Some(Span { start: span.map_or(call.start, |s| s.start), end: call.end });
                next = spans.next();
            }
            let span = span.unwrap_or(Span { start: now, end: now });
            now = span.end;
            span
        };
        actions.iter().enumerate().map(of).collect()
    };
    Times { rows: schedule.rows.iter().enumerate().map(row).collect() }
}
