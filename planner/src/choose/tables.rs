//! Tables of prices over a few variables, kept once each: equal tables have one number, so that what is computed from
//! equal tables is computed once. That is how repeated layers are solved once.

use std::rc::Rc;

use rustc_hash::FxHashMap;

/// A price: picoseconds, and one more for each collective, so that of equal prices fewer collectives win.
pub type Price = i64;

/// What must not be. Sums of a few stay below the largest number.
pub const NEVER: Price = 1 << 58;

/// Adds prices; what must not be stays so.
pub fn plus(a: Price, b: Price) -> Price {
    (a + b).min(NEVER)
}

/// So often a price, which stays below what must not be.
pub fn repeated(price: Price, times: usize) -> Price {
    price.saturating_mul(times as Price).min(MOST.max(price))
}

/// Twenty hours: nothing is compared that takes longer.
pub const MOST: Price = 1 << 56;

/// A price for each combination of the values of some variables, the last one innermost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    /// How many values each variable has.
    pub sizes: Vec<usize>,
    /// The prices.
    pub data: Vec<Price>,
}

impl Table {
    /// A table by a function of the values.
    pub fn of(sizes: Vec<usize>, mut price: impl FnMut(&[usize]) -> Price) -> Table {
        let n = sizes.iter().product();
        let mut at = vec![0; sizes.len()];
        let mut data = Vec::with_capacity(n);
        for _ in 0..n {
            data.push(price(&at).min(NEVER));
            step(&mut at, &sizes);
        }
        Table { sizes, data }
    }

    /// How far apart two neighbours along each variable are.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.sizes.len()];
        for i in (1..self.sizes.len()).rev() {
            strides[i - 1] = strides[i] * self.sizes[i];
        }
        strides
    }
}

/// The next combination, the last value first.
pub fn step(at: &mut [usize], sizes: &[usize]) {
    for i in (0..at.len()).rev() {
        at[i] += 1;
        if at[i] < sizes[i] {
            return;
        }
        at[i] = 0;
    }
}

/// A table, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(u32);

/// All tables, each once.
#[derive(Debug, Default)]
pub struct Tables {
    all: Vec<Rc<Table>>,
    numbers: FxHashMap<Rc<Table>, TableId>,
    arranged: FxHashMap<(TableId, Vec<Option<usize>>), TableId>,
}

impl Tables {
    /// The number of a table.
    pub fn intern(&mut self, table: Table) -> TableId {
        let table = Rc::new(table);
        if let Some(id) = self.numbers.get(&table) {
            return *id;
        }
        let id = TableId(self.all.len() as u32);
        self.all.push(table.clone());
        self.numbers.insert(table, id);
        id
    }

    /// A number for keys.
    pub fn number(&self, id: TableId) -> u64 {
        u64::from(id.0)
    }

    /// A table by its number.
    pub fn get(&self, id: TableId) -> &Rc<Table> {
        &self.all[id.0 as usize]
    }

    /// The same prices over other variables: variable `i` of the old table is variable `to[i]` of the new one. Several
    /// may become one, which then has one value; one that has only one value may go, to nowhere.
    pub fn arrange(&mut self, id: TableId, to: &[Option<usize>]) -> TableId {
        if to.iter().enumerate().all(|(i, j)| Some(i) == *j) {
            return id;
        }
        let key = (id, to.to_vec());
        if let Some(found) = self.arranged.get(&key) {
            return *found;
        }
        let old = self.get(id).clone();
        let strides = old.strides();
        let mut sizes = vec![0; to.iter().flatten().max().map_or(0, |m| m + 1)];
        to.iter().zip(&old.sizes).filter_map(|(j, n)| Some(((*j)?, n))).for_each(|(j, n)| sizes[j] = *n);
        let new = Table::of(sizes, |at| {
            let along = |(j, stride): (&Option<usize>, &usize)| j.map_or(0, |j| at[j] * stride);
            old.data[to.iter().zip(&strides).map(along).sum::<usize>()]
        });
        let found = self.intern(new);
        self.arranged.insert(key, found);
        found
    }
}
