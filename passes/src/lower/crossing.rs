//! What crosses rows of the pipeline in the update, once a step: sums over rows, such as that of the squares of all gradients,
//! and what only one row has and others need, such as the number of labels.
//!
//! What is a scalar, or of all rows, is summed by an all_reduce over the pipeline, to which rows without it give 0. Anything
//! else goes by messages between the rows that have or need it: each adds up what all of them have, in the order of rows.

use ir::program::{Buffer, BufferId, Duty, Instruction, Message, Region};
use ir::schedule::Kind;
use ir::{Axis, Move, Op, Reduce, Value};
use smallvec::smallvec;

use super::Lowering;
use super::kernels::Plain;
use super::sites::{Crossing, Site};

impl Lowering<'_> {
    /// Whether node `i` is a sum over rows, which was made when its operands crossed.
    pub(super) fn sums(&self, i: usize) -> bool {
        self.sites.crossings.get(&i).is_some_and(|c| c.contains(&Crossing::Sum))
    }

    /// Everything that crosses before node `i`.
    pub(super) fn cross(&mut self, i: usize) {
        let node = &self.sharded.graph.nodes[i];
        for crossing in self.sites.crossings.get(&i).cloned().unwrap_or_default() {
            match crossing {
                Crossing::Bring(v) => {
                    let users: Vec<usize> = self.users(v);
                    self.over_rows(v, &[v], &users, self.sites.homes.len());
                    self.brought.insert(v);
                }
                Crossing::Sum if node.op == Op::Add => {
                    let needed =
                        self.sites.of[i].iter().map(|(s, _)| self.sites.homes[*s]).collect::<Vec<_>>();
                    self.over_rows(node.results[0], &node.args, &needed, 0);
                }
                Crossing::Sum => {}
            }
        }
    }

    /// The rows in whose update a value is used.
    fn users(&self, v: Value) -> Vec<usize> {
        let nodes = self.sharded.graph.nodes.iter().enumerate().filter(|(_, n)| n.args.contains(&v));
        let sites = nodes.flat_map(|(i, _)| &self.sites.of[i]).filter(|(_, kind)| *kind == Kind::Optimizer);
        let mut rows: Vec<usize> = sites.map(|(s, _)| self.sites.homes[*s]).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// Gives rows the sum of operands, each of which the row that has it first contributes. What is brought lies behind the
    /// places of all stages.
    fn over_rows(&mut self, result: Value, operands: &[Value], needed: &[usize], behind: usize) {
        let count = self.rows.len();
        let mut parts: Vec<Vec<BufferId>> = vec![Vec::new(); count];
        for v in operands {
            let stage = self.origin(*v, &self.brought);
            let row = self.sites.homes[stage];
            let id = self.at(*v, (self.sites.first[row], Kind::Optimizer));
            parts[row].push(id);
        }
        let concerned = |r: usize| needed.contains(&r) || !parts[r].is_empty();
        let scalar = self.sharded.graph.shape(result).is_empty();
        match self.sharded.mesh.pipeline() {
            Some(axis) if scalar || (0..count).all(concerned) => {
                self.all_reduce(result, &parts, axis, behind)
            }
            Some(_) | None => self.exchange(result, &parts, needed, behind),
        }
    }

    /// Where the result lies in a row.
    fn place(&self, row: usize, behind: usize) -> usize {
        if behind > 0 { behind + row } else { self.sites.first[row] }
    }

    fn update_of(&self, row: usize) -> Site {
        (self.sites.first[row], Kind::Optimizer)
    }

    /// Adds up buffers of a row, in order, into one that is like `target`.
    fn add_up(&mut self, row: usize, parts: &[BufferId], target: Buffer) -> BufferId {
        let site = self.update_of(row);
        match parts {
            [] => {
                let kernel = self.kernels.plain(Plain::Zero, &target);
                let to = self.rows[row].push(target);
                self.launch(site, kernel, smallvec![], to);
                to
            }
            [one] => {
                let kernel = self.kernels.plain(Plain::Copy, &target);
                let to = self.rows[row].push(target);
                self.launch(site, kernel, smallvec![*one], to);
                to
            }
            [first, rest @ ..] => {
                let mut sum = *first;
                for next in rest {
                    let to = self.rows[row].push(target.clone());
                    let add = self.kernels.plain(Plain::Add, &target);
                    self.launch(site, add, smallvec![sum, *next], to);
                    sum = to;
                }
                sum
            }
        }
    }

    fn all_reduce(&mut self, result: Value, parts: &[Vec<BufferId>], axis: Axis, behind: usize) {
        for (row, parts) in parts.iter().enumerate() {
            let site = self.update_of(row);
            let mut like = self.like(result, Region::Scratch);
            like.sharding = like.sharding.clone().with_partial(axis, Reduce::Sum);
            let from = self.add_up(row, parts, like);
            let to = self.like(result, Region::Scratch);
            let to = self.rows[row].push(to);
            self.at.insert((result, self.place(row, behind)), to);
            let token = self.rows[row].token();
            let step = Move::AllReduce { axes: vec![axis], reduce: Reduce::Sum };
            self.emit(site, Duty::Work, Instruction::start(token, step, from, to));
            self.emit(site, Duty::Work, Instruction::Wait { token });
        }
    }

    fn exchange(&mut self, result: Value, parts: &[Vec<BufferId>], needed: &[usize], behind: usize) {
        let like = self.like(result, Region::Scratch);
        let mut sums: Vec<Vec<BufferId>> = vec![Vec::new(); parts.len()];
        let mut waits: Vec<(usize, Instruction)> = Vec::new();
        for (row, parts) in parts.iter().enumerate().filter(|(_, parts)| !parts.is_empty()) {
            let own = match parts[..] {
                [one] => one,
                [] | [_, ..] => self.add_up(row, parts, like.clone()),
            };
            for to in needed {
                if *to == row {
                    sums[*to].push(own);
                    continue;
                }
                let message =
                    Message { value: result, from: self.sites.first[row], to: self.sites.first[*to] };
                let token = self.rows[row].token();
                self.emit(self.update_of(row), Duty::Work, Instruction::Send { token, message, from: own });
                waits.push((row, Instruction::Sent { token, from: own }));
                let there = self.rows[*to].push(like.clone());
                let token = self.rows[*to].token();
                let receive = Instruction::Receive { token, message, to: there };
                self.emit(self.update_of(*to), Duty::Work, receive);
                waits.push((*to, Instruction::Received { token, to: there }));
                sums[*to].push(there);
            }
        }
        for (row, wait) in waits {
            self.emit(self.update_of(row), Duty::Work, wait);
        }
        for row in needed {
            let sum = match sums[*row][..] {
                [one] => one,
                [] | [_, ..] => self.add_up(*row, &sums[*row], like.clone()),
            };
            self.at.insert((result, self.place(*row, behind)), sum);
        }
    }
}
