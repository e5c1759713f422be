//! Sums and products of steps as few instructions: up to three operands with lanes in one loop, what is added to a product
//! with it, and the sum of a row's products without the products.

use ir::Reduce;
use ir::kernel::Step;

use super::super::lanes::{Addend, Form, MOST, Many, Pair};
use super::plan::Builder;
use super::{Class, Code, NOTHING, Term};

/// A product that the step that uses it may compute: its scale and the steps of its factors.
#[derive(Clone)]
pub(super) struct Pending {
    scale: f64,
    factors: Vec<usize>,
}

/// Operands of an instruction of a class: one number, or one a row, and lanes.
struct Split {
    class: Class,
    number: Option<usize>,
    lanes: Vec<usize>,
}

impl Builder<'_> {
    /// A step's register. What was left to its user is computed now.
    pub(super) fn value(&mut self, step: usize) -> usize {
        if let Some(Pending { scale, factors }) = self.pending[step].take() {
            let all = self.factors(scale, &factors);
            self.register[step] = self.fold(Pair::Mul, all, 1.0);
        }
        self.register[step]
    }

    fn factors(&mut self, scale: f64, factors: &[usize]) -> Vec<usize> {
        let mut all: Vec<usize> = factors.iter().map(|r| self.value(*r)).collect();
        if scale != 1.0 {
            all.push(self.constant(scale));
        }
        all
    }

    /// A product: where its only user adds to it or sums its rows, that computes it.
    pub(super) fn product(&mut self, place: usize, scale: f64, factors: &[usize]) -> Option<usize> {
        let steps = self.map.steps.iter().enumerate();
        let mut users = steps.filter(|(i, _)| self.live[*i]).flat_map(|(_, step)| {
            let uses = step.uses();
            let times = uses.iter().filter(|r| **r == place).count();
            std::iter::repeat_n(step, times)
        });
        let joins = match (users.next(), users.next()) {
            (Some(Step::Add(all)), None) => all.len() == 2,
            (Some(Step::Row(Reduce::Sum, _)), None) => true,
            (Some(_), _) | (None, _) => false,
        };
        if joins {
            self.pending[place] = Some(Pending { scale, factors: factors.to_vec() });
            return None;
        }
        let all = self.factors(scale, factors);
        Some(self.fold(Pair::Mul, all, 1.0))
    }

    /// A sum: with the product before it, if there is one.
    pub(super) fn sum(&mut self, all: &[usize]) -> usize {
        if let [a, b] = *all {
            for (product, other) in [(b, a), (a, b)] {
                if let Some(found) = self.product_and(product, other) {
                    return found;
                }
            }
        }
        let all = all.iter().map(|r| self.value(*r)).collect();
        self.fold(Pair::Add, all, 0.0)
    }

    fn product_and(&mut self, product: usize, other: usize) -> Option<usize> {
        let Pending { scale, factors } = self.pending[product].clone()?;
        let addend = self.value(other);
        let all = self.factors(scale, &factors);
        let class = all.iter().map(|r| self.class[*r]).max()?;
        if self.class[addend] > class || all.len() < 2 {
            return None;
        }
        let split = self.split(Pair::Mul, all);
        if split.lanes.len() > MOST {
            return None;
        }
        self.pending[product] = None;
        Some(self.term(Pair::Mul, split, Some(addend)))
    }

    /// The sum of each row of a product that was left to it.
    pub(super) fn row_sum(&mut self, step: usize) -> Option<usize> {
        let Pending { scale, factors } = self.pending[step].clone()?;
        let all = self.factors(scale, &factors);
        let Split { class, number, lanes } = self.split(Pair::Mul, all);
        if class != Class::Point || lanes.len() > MOST {
            return None;
        }
        self.pending[step] = None;
        let number = number.map(|r| self.widen(r, Class::Row));
        let term = self.joined(self.lanes.sums, number, lanes, None, true);
        Some(self.emit_term(Code::Sums, term, Class::Row))
    }

    /// Combines registers, those with fewer lanes first.
    pub(super) fn fold(&mut self, f: Pair, all: Vec<usize>, empty: f64) -> usize {
        match *all {
            [] => return self.constant(empty),
            [one] => return one,
            [..] => {}
        }
        let Split { class, mut number, lanes } = self.split(f, all);
        let mut lanes = lanes.into_iter();
        let mut last: Option<usize> = None;
        loop {
            let room = MOST - usize::from(last.is_some());
            let some: Vec<usize> = last.into_iter().chain(lanes.by_ref().take(room)).collect();
            last = Some(match (number.take(), &*some) {
                (None, [one]) => return *one,
                (None, [a, b]) => self.two(f, *a, *b),
                (Some(number), [one]) => self.two(f, number, *one),
                (number, _) => self.term(f, Split { class, number, lanes: some }, None),
            });
        }
    }

    /// Parts registers into numbers, which are combined, and lanes, all of the largest class.
    fn split(&mut self, f: Pair, mut all: Vec<usize>) -> Split {
        all.sort_by_key(|r| self.class[*r]);
        let class = all.last().map_or(Class::Once, |r| self.class[*r]);
        let (numbers, lanes): (Vec<_>, Vec<_>) = all.into_iter().partition(|r| self.is_number(*r, class));
        Split {
            class,
            number: numbers.into_iter().reduce(|a, b| self.two(f, a, b)),
            lanes: lanes.into_iter().map(|r| self.widen(r, class)).collect(),
        }
    }

    fn term(&mut self, f: Pair, Split { class, number, lanes }: Split, addend: Option<usize>) -> usize {
        let addend_is_number = addend.is_some_and(|r| self.is_number(r, class));
        let numbers = [number, addend.filter(|_| addend_is_number)];
        let by_row = numbers.into_iter().flatten().any(|r| self.class[r] == Class::Row);
        // One number a row, if any is.
        let wide = |b: &mut Self, r: usize| if by_row { b.widen(r, Class::Row) } else { r };
        let number = number.map(|r| wide(self, r));
        let addend = addend.map(|r| match addend_is_number {
            true => (Addend::Number, wide(self, r)),
            false => (Addend::Lanes, self.widen(r, class)),
        });
        let by = if f == Pair::Mul { self.lanes.product } else { self.lanes.sum };
        let term = self.joined(by, number, lanes, addend, by_row);
        self.emit_term(Code::Term, term, class)
    }

    /// The function for these operands, and where it finds them.
    fn joined(
        &self,
        by: fn(Form) -> Many,
        number: Option<usize>,
        lanes: Vec<usize>,
        addend: Option<(Addend, usize)>,
        by_row: bool,
    ) -> Term {
        let kind = addend.map_or(Addend::None, |(kind, _)| kind);
        let form = Form { number: number.is_some(), lanes: lanes.len(), addend: kind };
        let operations = lanes.len() - 1 + usize::from(form.number) + usize::from(addend.is_some());
        let mut operands = [NOTHING; MOST + 2];
        operands[0] = number.unwrap_or(NOTHING);
        operands[MOST + 1] = addend.map_or(NOTHING, |(_, r)| r);
        for (to, r) in operands[1..].iter_mut().zip(lanes) {
            *to = r;
        }
        Term { f: by(form), operands, by_row, operations }
    }

    fn emit_term(&mut self, code: fn(Term) -> Code, term: Term, class: Class) -> usize {
        let fixed = term.operands.iter().all(|r| *r == NOTHING || self.fixed[*r]);
        self.emit(code(term), class, fixed)
    }
}
