//! Drawn timelines: within their width, and schedule files themselves.

use super::table;
use crate::schedules::SCHEDULES;
use crate::schedules::draw::draw;
use crate::schedules::figures::in_units;
use crate::schedules::read::read;
use ir::schedule::simulate::{Durations, Work, simulate};

#[test]
fn pictures_fit_and_are_read_back() {
    for kind in SCHEDULES {
        for (stages, microbatches) in [(1, 1), (2, 3), (4, 8), (11, 24)] {
            let schedule = table(kind.name, stages, microbatches, kind.virtuals);
            let uneven = Work { forward: 3.7, input: 0.2, weight: 1.9, optimizer: 0.01 };
            let uneven = Durations::even(uneven, schedule.stages(), 2.5);
            for times in [in_units(&schedule).unwrap(), simulate(&schedule, &uneven).unwrap()] {
                let picture = draw(&schedule, &times, 99);
                let widest = picture.lines().map(str::len).max();
                assert!(widest <= Some(99), "{}: {widest:?}\n{picture}", kind.name);
                assert_eq!(read(&picture, "picture"), Ok(schedule.clone()), "{}\n{picture}", kind.name);
            }
        }
    }
}

#[test]
fn the_pictures() {
    let mut all = String::new();
    for kind in SCHEDULES {
        let schedule = table(kind.name, 4, 8, kind.virtuals);
        let picture = draw(&schedule, &in_units(&schedule).unwrap(), 99);
        all.push_str(&format!("{}\n{picture}\n", kind.name));
    }
    insta::assert_snapshot!(all);
}
