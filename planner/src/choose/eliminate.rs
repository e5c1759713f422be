//! The least sum of tables over all values of all variables, by exact elimination: a variable is taken away by writing,
//! for each combination of values of those that share a table with it, the least that it can add (Dechter, "Bucket
//! elimination", 1999). The next variable is always one with the smallest new table. What is computed from the same
//! tables in the same way is computed once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::tables::{NEVER, Price, Table, TableId, Tables, step};

/// A variable, by its number.
pub type Var = usize;

/// A few variables.
type Vars = SmallVec<[Var; 4]>;

/// More combinations than this are too many for one table; some values of a variable are then given up.
const WIDEST: u64 = 1 << 25;

/// Tables that share a variable with more than this many others wait for them.
const HUB: usize = 48;

/// Variables and tables over them.
#[derive(Debug, Default)]
pub struct Network {
    /// How many values each variable has.
    pub domains: Vec<usize>,
    /// The tables.
    pub tables: Tables,
    factors: Vec<(Vars, TableId)>,
}

/// The best values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// The least sum.
    pub price: i128,
    /// The value of each variable.
    pub pick: Vec<usize>,
    /// Whether it is proved the least: no value was given up.
    pub exact: bool,
    /// In how many combinations the widest table was.
    pub widest: u64,
}

impl Network {
    /// A new variable with so many values.
    pub fn variable(&mut self, values: usize) -> Var {
        self.domains.push(values);
        self.domains.len() - 1
    }

    /// Adds the prices of a table over these variables, in this order; one may stand several times.
    pub fn add(&mut self, vars: &[Var], table: TableId) {
        let mut sorted: Vars = vars.iter().copied().filter(|v| self.domains[*v] > 1).collect();
        sorted.sort_unstable();
        sorted.dedup();
        let to: SmallVec<[Option<usize>; 4]> = vars.iter().map(|v| sorted.binary_search(v).ok()).collect();
        let table = self.tables.arrange(table, &to);
        self.factors.push((sorted, table));
    }

    /// The sum of all tables at these values.
    pub fn price(&self, pick: &[usize]) -> i128 {
        let of = |(vars, id): &(Vars, TableId)| {
            let table = self.tables.get(*id);
            let at: usize = vars.iter().zip(table.strides()).map(|(v, s)| pick[*v] * s).sum();
            i128::from(table.data[at])
        };
        self.factors.iter().map(of).sum()
    }

    /// The least sum. Of equal ones, that with the first values.
    pub fn solve(&mut self) -> Solution {
        self.solve_within(WIDEST)
    }

    /// The least sum, in tables of no more than so many combinations.
    fn solve_within(&mut self, widest: u64) -> Solution {
        let domains = self.domains.clone();
        let mut at = Eliminating {
            kept: domains.iter().map(|n| Rc::new((0..*n).collect())).collect(),
            domains,
            factors: Vec::new(),
            of: vec![Vec::new(); self.domains.len()],
            live: vec![0; self.domains.len()],
            queue: BinaryHeap::new(),
            version: vec![0; self.domains.len()],
            known: FxHashMap::default(),
            key: Vec::new(),
            offset: 0,
            widest: 0,
            exact: true,
        };
        for (vars, table) in self.factors.clone() {
            match vars.is_empty() {
                true => at.offset += i128::from(self.tables.get(table).data[0]),
                false => at.push(vars, table),
            }
        }
        // A variable with one value is in no table, and has that value.
        at.widest = u64::from(!self.domains.is_empty());
        (0..self.domains.len()).filter(|v| self.domains[*v] > 1).for_each(|v| at.queue_up(v));
        let mut order: Vec<Gone> = Vec::new();
        while let Some(Reverse((work, v, version))) = at.queue.pop() {
            if version != at.version[v] {
                continue;
            }
            at.forget_used_up(v);
            let scope = at.scope(v);
            let now = at.combinations(v, &scope);
            if now != work {
                at.queue.push(Reverse((now, v, version)));
                continue;
            }
            if now > widest {
                at.give_up(v, &mut self.tables);
                continue;
            }
            at.widest = at.widest.max(now);
            let best = at.eliminate(v, &scope, &mut self.tables);
            let scope = scope.into_iter().map(|u| (u, at.kept[u].clone())).collect();
            order.push(Gone { var: v, kept: at.kept[v].clone(), scope, best });
        }
        let mut pick = vec![0; self.domains.len()];
        for Gone { var, kept, scope, best } in order.iter().rev() {
            let place = |u: Var, kept: &Kept| kept.binary_search(&pick[u]).unwrap_or(0);
            let index = scope.iter().fold(0, |i, (u, kept)| i * kept.len() + place(*u, kept));
            pick[*var] = kept[best.value[index] as usize];
        }
        Solution { price: at.offset, pick, exact: at.exact, widest: at.widest }
    }
}

/// The values of a variable that are left, in order.
type Kept = Rc<Vec<usize>>;

/// A variable that is gone, and those that shared a table with it, each with the values that were left then: some may be
/// given up later.
struct Gone {
    var: Var,
    kept: Kept,
    scope: Vec<(Var, Kept)>,
    best: Rc<Best>,
}

/// What is left when a variable is gone.
#[derive(Debug)]
struct Best {
    /// Over the others.
    table: TableId,
    /// What each entry of the table is above.
    offset: Price,
    /// For each entry the variable's value.
    value: Vec<u32>,
}

/// A table, and the places of its variables.
type Part = (TableId, Vars);

struct Eliminating {
    domains: Vec<usize>,
    /// For each variable the values that were not given up.
    kept: Vec<Kept>,
    /// None once it is used up.
    factors: Vec<Option<(Vars, TableId)>>,
    /// For each variable its factors, used up ones among them.
    of: Vec<Vec<usize>>,
    /// For each variable how many of its factors are not used up.
    live: Vec<usize>,
    queue: BinaryHeap<Reverse<(u64, Var, u32)>>,
    version: Vec<u32>,
    known: FxHashMap<Vec<u64>, Rc<Best>>,
    /// Room for the next key.
    key: Vec<u64>,
    offset: i128,
    widest: u64,
    exact: bool,
}

impl Eliminating {
    fn push(&mut self, vars: Vars, table: TableId) {
        for v in &vars {
            self.of[*v].push(self.factors.len());
            self.live[*v] += 1;
        }
        self.factors.push(Some((vars, table)));
    }

    fn queue_up(&mut self, v: Var) {
        self.version[v] += 1;
        // A variable in very many tables is met after each of them: it is not gone through every time.
        let work = if self.live[v] > HUB {
            u64::MAX
        } else {
            self.forget_used_up(v);
            self.combinations(v, &self.scope(v))
        };
        self.queue.push(Reverse((work, v, self.version[v])));
    }

    fn forget_used_up(&mut self, v: Var) {
        let factors = &self.factors;
        self.of[v].retain(|f| factors[*f].is_some());
    }

    /// How many combinations the elimination of a variable visits that shares tables with these.
    fn combinations(&self, v: Var, scope: &[Var]) -> u64 {
        let size = |u: &Var| self.domains[*u] as u64;
        scope.iter().map(size).fold(size(&v), u64::saturating_mul)
    }

    /// Those that share a table with a variable, in order.
    fn scope(&self, v: Var) -> Vars {
        let mut scope = Vars::new();
        for (vars, _) in self.of[v].iter().filter_map(|f| self.factors[*f].as_ref()) {
            scope.extend_from_slice(vars);
        }
        scope.sort_unstable();
        scope.dedup();
        scope.retain(|u| *u != v);
        scope
    }

    /// Takes a variable away that shares tables with these.
    fn eliminate(&mut self, v: Var, scope: &[Var], tables: &mut Tables) -> Rc<Best> {
        let mut parts: Vec<Part> = Vec::new();
        for f in std::mem::take(&mut self.of[v]) {
            let Some((vars, table)) = self.factors[f].take() else { continue };
            vars.iter().for_each(|u| self.live[*u] -= 1);
            // The variable itself stands behind all others.
            let place = |u: &Var| scope.binary_search(u).unwrap_or(scope.len());
            parts.push((table, vars.iter().map(place).collect()));
        }
        parts.sort();
        let sizes: Vec<usize> = scope.iter().map(|u| self.domains[*u]).collect();
        let mut key = std::mem::take(&mut self.key);
        key.clear();
        key.extend([self.domains[v] as u64, sizes.len() as u64]);
        key.extend(sizes.iter().map(|n| *n as u64));
        for (table, places) in &parts {
            key.push(u64::MAX);
            key.push(tables.number(*table));
            key.extend(places.iter().map(|p| *p as u64));
        }
        let best = match self.known.get(&key) {
            Some(best) => best.clone(),
            None => {
                let best = Rc::new(least(&parts, &sizes, self.domains[v], tables));
                self.known.insert(key.clone(), best.clone());
                best
            }
        };
        self.key = key;
        self.offset += i128::from(best.offset);
        if !scope.is_empty() {
            self.push(scope.into(), best.table);
            scope.iter().for_each(|u| self.queue_up(*u));
        }
        best
    }

    /// Gives up half of the values of the variable with most of them, around one whose table would be too wide: those
    /// that add most by themselves.
    fn give_up(&mut self, v: Var, tables: &mut Tables) {
        self.exact = false;
        let mut near = self.scope(v);
        near.push(v);
        let Some(w) = near.iter().copied().max_by_key(|u| (self.domains[*u], Reverse(*u))) else { return };
        let n = self.domains[w];
        let mut own = vec![0; n];
        let factors: Vec<usize> = self.of[w].iter().copied().filter(|f| self.factors[*f].is_some()).collect();
        for f in &factors {
            let Some((vars, id)) = &self.factors[*f] else { continue };
            let table = tables.get(*id);
            let place = vars.iter().position(|u| *u == w).unwrap_or(0);
            let stride = table.strides()[place];
            let mut least = vec![NEVER; n];
            for (i, price) in table.data.iter().enumerate() {
                let x = i / stride % n;
                least[x] = least[x].min(*price);
            }
            own.iter_mut().zip(least).for_each(|(o, l)| *o = super::tables::plus(*o, l));
        }
        let mut best: Vec<usize> = (0..n).collect();
        best.sort_by_key(|x| own[*x]);
        best.truncate(n.div_ceil(2).max(1));
        best.sort_unstable();
        for f in factors {
            let Some((vars, id)) = self.factors[f].clone() else { continue };
            let table = tables.get(id).clone();
            let place = vars.iter().position(|u| *u == w).unwrap_or(0);
            let (strides, mut sizes) = (table.strides(), table.sizes.clone());
            sizes[place] = best.len();
            let fewer = Table::of(sizes, |at| {
                let index = |(i, x): (usize, &usize)| strides[i] * if i == place { best[*x] } else { *x };
                table.data[at.iter().enumerate().map(index).sum::<usize>()]
            });
            self.factors[f] = Some((vars, tables.intern(fewer)));
        }
        self.kept[w] = Rc::new(best.iter().map(|x| self.kept[w][*x]).collect());
        self.domains[w] = best.len();
        near.into_iter().for_each(|u| self.queue_up(u));
    }
}

/// The least over the values of a variable of the sum of tables, for each combination of the others. In `parts` stand
/// each table and the places of its variables among the others, the variable's own behind them all.
fn least(parts: &[Part], sizes: &[usize], values: usize, tables: &mut Tables) -> Best {
    let n = sizes.len();
    // For each table its prices, and how far a step along each of the others, and along the variable, goes.
    let each: Vec<(Rc<Table>, Vec<usize>, usize)> = parts
        .iter()
        .map(|(id, places)| {
            let table = tables.get(*id).clone();
            let mut along = vec![0; n + 1];
            places.iter().zip(table.strides()).for_each(|(p, s)| along[*p] += s);
            let own = along[n];
            along.truncate(n);
            (table, along, own)
        })
        .collect();
    let total: usize = sizes.iter().product();
    let (mut data, mut value) = (Vec::with_capacity(total), Vec::with_capacity(total));
    let mut at = vec![0; n];
    let mut sum = vec![0; values];
    for _ in 0..total {
        sum.fill(0);
        for (table, along, own) in &each {
            let base: usize = at.iter().zip(along).map(|(x, s)| x * s).sum();
            if *own == 1 {
                let row = &table.data[base..base + values];
                sum.iter_mut().zip(row).for_each(|(s, p)| *s = (*s + p).min(NEVER));
            } else {
                let row = table.data[base..].iter().step_by((*own).max(1));
                if *own == 0 {
                    sum.iter_mut().for_each(|s| *s = (*s + table.data[base]).min(NEVER));
                } else {
                    sum.iter_mut().zip(row).for_each(|(s, p)| *s = (*s + p).min(NEVER));
                }
            }
        }
        let (mut best, mut least) = (0, Price::MAX);
        for (x, price) in sum.iter().enumerate() {
            if *price < least {
                (best, least) = (x, *price);
            }
        }
        data.push(least);
        value.push(best as u32);
        step(&mut at, sizes);
    }
    // What is common is set aside, so that layers that differ only by what came before them have equal tables.
    let offset = data.iter().copied().min().unwrap_or(0);
    let above = |p: &mut Price| *p = if *p >= NEVER { NEVER } else { *p - offset };
    if offset < NEVER {
        data.iter_mut().for_each(above);
    }
    let offset = if offset < NEVER { offset } else { 0 };
    let (offset, data) = if n == 0 && data[0] >= NEVER { (NEVER, vec![0]) } else { (offset, data) };
    Best { table: tables.intern(Table { sizes: sizes.to_vec(), data }), offset, value }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, from a counter (Steele et al., "SplitMix").
    fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
        move |below| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = seed;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % below
        }
    }

    /// Six variables with some tables over up to three each.
    fn network(seed: u64) -> Network {
        let mut next = numbers(seed);
        let mut network = Network::default();
        let vars: Vec<Var> = (0..6).map(|_| network.variable(1 + next(4) as usize)).collect();
        for _ in 0..9 {
            let of: Vec<Var> = (0..1 + next(3)).map(|_| vars[next(6) as usize]).collect();
            let sizes = of.iter().map(|v| network.domains[*v]).collect();
            let table = Table::of(sizes, |_| if next(9) == 0 { NEVER } else { next(50) as Price });
            let id = network.tables.intern(table);
            network.add(&of, id);
        }
        network
    }

    #[test]
    fn values_that_are_given_up_leave_a_price_that_is_paid() {
        let mut given_up = 0;
        for seed in 0..300 {
            let solution = network(seed).solve_within(12);
            let paid = network(seed).price(&solution.pick);
            given_up += usize::from(!solution.exact);
            if paid < i128::from(NEVER) {
                assert_eq!(solution.price, paid, "seed {seed}");
            }
            assert!(paid >= network(seed).solve().price.min(i128::from(NEVER)), "seed {seed}");
        }
        assert!(given_up > 50);
    }

    #[test]
    fn the_least_sum_is_that_of_all_combinations() {
        for seed in 0..300 {
            let mut network = network(seed);
            let mut at = vec![0; 6];
            let mut least = i128::MAX;
            for _ in 0..network.domains.iter().product() {
                least = least.min(network.price(&at));
                step(&mut at, &network.domains.clone());
            }
            let solution = network.solve();
            assert!(solution.exact);
            if least < i128::from(NEVER) {
                assert_eq!(solution.price, least, "seed {seed}");
                assert_eq!(network.price(&solution.pick), least, "seed {seed}");
            } else {
                assert!(network.price(&solution.pick) >= i128::from(NEVER), "seed {seed}");
            }
        }
    }
}
