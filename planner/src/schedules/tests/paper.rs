//! Times that are published, or follow in closed form.
//!
//! Zero Bubble (Qi et al., arXiv 2401.10241): with the times of its table 9 the bubble rates of its table 5, to the 4 digits
//! that it prints. A rate is 1 - M (F + I + W) / the largest span of a rank.

use super::table;
use crate::schedules::read::read;
use ir::schedule::simulate::{Durations, Span, Work, simulate};

/// P, M; milliseconds of F, I, W and a hop; rates of 1F1B, ZB-H1, ZB-H2.
const RATES: [(usize, usize, [f64; 4], [f64; 3]); 12] = [
    (8, 24, [18.522, 18.086, 9.337, 0.601], [0.2431, 0.1585, 0.1083]),
    (8, 32, [18.513, 18.086, 9.331, 0.626], [0.1985, 0.1242, 0.0837]),
    (8, 64, [18.546, 18.097, 9.321, 0.762], [0.1240, 0.0674, 0.0444]),
    (8, 24, [29.718, 29.444, 19.927, 0.527], [0.2347, 0.1323, 0.0698]),
    (8, 32, [29.802, 29.428, 19.530, 0.577], [0.1898, 0.1045, 0.0559]),
    (8, 64, [29.935, 29.621, 19.388, 0.535], [0.1091, 0.0554, 0.0294]),
    (16, 48, [11.347, 11.248, 8.132, 0.377], [0.2552, 0.1397, 0.0672]),
    (16, 64, [11.307, 11.254, 8.101, 0.379], [0.2082, 0.1088, 0.0516]),
    (16, 128, [11.325, 11.308, 8.109, 0.378], [0.1251, 0.0576, 0.0266]),
    (32, 96, [10.419, 10.207, 7.715, 0.408], [0.2646, 0.1421, 0.0641]),
    (32, 128, [10.408, 10.204, 7.703, 0.408], [0.2168, 0.1106, 0.0490]),
    (32, 256, [10.402, 10.248, 7.698, 0.460], [0.1352, 0.0594, 0.0257]),
];

#[test]
fn bubble_rates_of_zero_bubble() {
    for (stages, microbatches, [forward, input, weight, hop], rates) in RATES {
        for (kind, rate) in ["1f1b", "zb-h1", "zb-h2"].into_iter().zip(rates) {
            let work = Work { forward, input, weight, optimizer: 0.0 };
            let schedule = table(kind, stages, microbatches, 1);
            let times = simulate(&schedule, &Durations::even(work, stages, hop)).unwrap();
            let busy = microbatches as f64 * (forward + input + weight);
            let got = 1.0 - busy / times.longest_span();
            assert_eq!(format!("{got:.4}"), format!("{rate:.4}"), "{kind} P={stages} M={microbatches}");
        }
    }
}

/// Closed forms of the same steps, where a hop is pure latency and P divides M. With T = F + I + W and hop h: 1F1B
/// (M + P - 1) T + h (2 M (P - 1) / P + 2 (P - 2)); ZB-H1 M T + (P - 1)(F + I - W + 4 h); ZB-H2, by its longest span,
/// M T + (P - 1)(F + I - 2 W + 2 h); interleaved (M + (P - 1) / L) T + h (2 P L - 2). Equal to 1e-9 of the step.
#[test]
fn steps_in_closed_form() {
    for (stages, microbatches, [f, i, w, h], _) in RATES {
        let (p, m, t) = (stages as f64, microbatches as f64, f + i + w);
        for (kind, virtuals, expected) in [
            ("1f1b", 1, (m + p - 1.0) * t + h * (2.0 * m * (p - 1.0) / p + 2.0 * (p - 2.0))),
            ("zb-h1", 1, m * t + (p - 1.0) * (f + i - w + 4.0 * h)),
            ("zb-h2", 1, m * t + (p - 1.0) * (f + i - 2.0 * w + 2.0 * h)),
            ("interleaved", 2, (m + (p - 1.0) / 2.0) * t + h * (4.0 * p - 2.0)),
            ("interleaved", 4, (m + (p - 1.0) / 4.0) * t + h * (8.0 * p - 2.0)),
        ] {
            let l = virtuals as f64;
            let work = Work { forward: f / l, input: i / l, weight: w / l, optimizer: 0.0 };
            let durations = Durations::even(work, stages * virtuals, h);
            let times = simulate(&table(kind, stages, microbatches, virtuals), &durations).unwrap();
            let got = if kind == "zb-h2" { times.longest_span() } else { times.makespan() };
            assert!((got / expected - 1.0).abs() < 1e-9, "{kind} {virtuals} P={stages}: {got} {expected}");
        }
    }
}

#[test]
fn a_small_step_by_hand() {
    let schedule = read("0F0 0F1 0B0 0I1 0W1 0O\n1F0 1B0 1F1 1B1 1O", "by hand").unwrap();
    let first = Work { forward: 1.0, input: 2.0, weight: 3.0, optimizer: 0.5 };
    let second = Work { forward: 4.0, input: 1.0, weight: 2.0, optimizer: 0.25 };
    let times = simulate(&schedule, &Durations { stages: vec![first, second], hop: 0.5 }).unwrap();
    let spans =
        |row: &[(f64, f64)]| row.iter().map(|(start, end)| Span { start: *start, end: *end }).collect();
    let rows: [Vec<Span>; 2] = [
        spans(&[(0.0, 1.0), (1.0, 2.0), (9.0, 14.0), (16.0, 18.0), (18.0, 21.0), (21.0, 21.5)]),
        spans(&[(1.5, 5.5), (5.5, 8.5), (8.5, 12.5), (12.5, 15.5), (15.5, 15.75)]),
    ];
    assert_eq!(times.rows, rows);
    assert_eq!((times.makespan(), times.span(1), times.busy(1)), (21.5, 14.25, 14.25));
    assert_eq!(times.bubble_fraction(), 1.0 - (12.5 + 14.25) / 43.0);
}
