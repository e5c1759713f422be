//! Planted faults: each breaks a compiled program as a wrong pass would, and what is held against every random graph
//! must find it, else that is worth nothing.

mod table;

use std::sync::Arc;

use ir::kernel::{Body, Contract, Map, Scatter};
use ir::program::{Instruction, Program};
use ir::{Mesh, Move};
use meshc_tests::random::Random;
use passes::Compiled;

use crate::build::Builder;
use crate::check::{compiled, runs_right};
use crate::recipe::Recipe;

/// What is broken. Each says whether it could be.
pub enum Broken {
    Map(fn(&mut Map) -> bool),
    Contraction(fn(&mut Contract) -> bool),
    Scatter(fn(&mut Scatter) -> bool),
    /// What a collective does.
    Collective(fn(&mut Move, &Mesh) -> bool),
    /// An instruction of this kind is missing.
    Dropped(fn(&Instruction) -> bool),
    /// It changes places with the next.
    Late(fn(&Instruction) -> bool),
    /// Anything else.
    Program(fn(&mut Program) -> bool),
}

impl Broken {
    /// The program with the fault at its n-th instruction, if it can be there.
    fn planted(&self, program: &Program, n: usize) -> Option<Program> {
        let mut program = program.clone();
        if let Broken::Program(change) = self {
            return (n == 0 && change(&mut program)).then_some(program);
        }
        let mesh = program.mesh.clone();
        let mut left = n;
        let segment = program.stages[0].segments.iter_mut().find(|s| {
            let here = left < s.instructions.len();
            left -= if here { 0 } else { s.instructions.len() };
            here
        })?;
        let instruction = &mut segment.instructions[left];
        let done = match (self, &mut *instruction) {
            (Broken::Map(change), Instruction::Launch { kernel, .. }) => {
                if let Body::Map(map) = &mut Arc::make_mut(kernel).body { change(map) } else { false }
            }
            (Broken::Contraction(change), Instruction::Launch { kernel, .. }) => {
                if let Body::Contract(contract) = &mut Arc::make_mut(kernel).body {
                    change(contract)
                } else {
                    false
                }
            }
            (Broken::Scatter(change), Instruction::Launch { kernel, .. }) => {
                if let Body::Scatter(scatter) = &mut Arc::make_mut(kernel).body {
                    change(scatter)
                } else {
                    false
                }
            }
            (Broken::Collective(change), Instruction::Start { parts, .. }) => {
                let step = &mut parts[0].step;
                mesh.pieces(step.axes()) > 1 && change(step, &mesh)
            }
            (Broken::Dropped(is), _) => {
                let found = is(instruction);
                if found {
                    segment.instructions.remove(left);
                }
                found
            }
            (Broken::Late(is), _) => {
                let found = is(instruction) && left + 1 < segment.instructions.len();
                if found {
                    segment.instructions.swap(left, left + 1);
                }
                found
            }
            (Broken::Map(_) | Broken::Contraction(_) | Broken::Scatter(_) | Broken::Collective(_), _)
            | (Broken::Program(_), _) => false,
        };
        done.then_some(program)
    }
}

/// Compiled graphs with which nothing is wrong.
fn sound(seeds: std::ops::Range<u64>) -> Vec<(u64, Compiled)> {
    let one = |seed| Some((seed, compiled(&Builder::build(&Recipe::draw(seed)), seed).ok()?));
    seeds.filter_map(one).filter(|(seed, compiled)| runs_right(compiled, *seed).is_ok()).collect()
}

/// How often each fault is planted at most.
const TIMES: usize = 24;

#[test]
fn every_planted_fault_is_found() {
    let sound = sound(0..160);
    let random = &mut Random::new(1);
    let mut wrong = Vec::new();
    for (what, needed, broken) in table::FAULTS {
        let (mut planted, mut found, mut said) = (0, 0, String::new());
        for (seed, whole) in &sound {
            let n: usize = whole.program.stages[0].segments.iter().map(|s| s.instructions.len()).sum();
            let places = random.shuffled((0..n.max(1)).collect());
            let program = places.into_iter().find_map(|place| broken.planted(&whole.program, place));
            let Some(program) = program.filter(|_| planted < TIMES) else { continue };
            planted += 1;
            let broken = Compiled { program, sharded: whole.sharded.clone() };
            if let Err(text) = runs_right(&broken, *seed) {
                found += 1;
                said = text;
            }
        }
        println!("{what}: {found} of {planted}, as in\n    {}", said.lines().next().unwrap_or(""));
        if planted < 3 || 100 * found < needed * planted {
            wrong.push(format!("{what}: found {found} of {planted}, {needed} of a hundred are needed"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
