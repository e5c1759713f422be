//! Products and sums of several operands in one loop. Each operation rounds by itself, in the order of the operands, so that
//! the numbers do not depend on what was joined.

/// Which operands there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Form {
    /// A number for each row, before the lanes.
    pub number: bool,
    /// How many have lanes: 1 to [`MOST`].
    pub lanes: usize,
    /// What is added at last.
    pub addend: Addend,
}

/// What is added to a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Addend {
    /// Nothing.
    None,
    /// A number for each row.
    Number,
    /// Lanes.
    Lanes,
}

/// The most operands with lanes, but for an addend.
pub const MOST: usize = 3;

/// The operands: the number, those with lanes, and the addend; what a form lacks is null.
pub type Operands = [*const f32; MOST + 2];

/// Destination, operands, rows, lanes of a row. The destination overlaps no operand.
pub type Many = unsafe fn(*mut f32, &Operands, usize, usize);

/// Adds nothing, a number a row, or lanes: as a constant of a type.
pub const NONE: u8 = 0;
pub const NUMBER: u8 = 1;
pub const LANES: u8 = 2;

/// A lane of the operands combined.
#[inline(always)]
unsafe fn lane<const N: usize>(
    number: Option<f32>,
    lanes: &[*const f32; N],
    i: usize,
    f: impl Fn(f32, f32) -> f32,
) -> f32 {
    // SAFETY: the caller gives an `i` that the lanes have.
    unsafe {
        let first = *lanes[0].add(i);
        let mut x = number.map_or(first, |n| f(n, first));
        for lanes in &lanes[1..] {
            x = f(x, *lanes.add(i));
        }
        x
    }
}

/// Calls `visit` with the number and the lanes of each row.
#[inline(always)]
unsafe fn rows<const ONE: bool, const N: usize>(
    of: &Operands,
    rows: usize,
    row: usize,
    mut visit: impl FnMut(usize, Option<f32>, [*const f32; N]),
) {
    for r in 0..rows {
        // SAFETY: the caller gives a number for each row, and `rows * row` lanes of each.
        let (number, lanes) =
            unsafe { (ONE.then(|| *of[0].add(r)), std::array::from_fn(|i| of[1 + i].add(r * row))) };
        visit(r, number, lanes);
    }
}

/// `f` over the operands, and the addend.
///
/// # Safety
/// As [`Many`] and the form say.
#[inline(always)]
pub unsafe fn each<const ONE: bool, const N: usize, const ADDEND: u8>(
    d: *mut f32,
    of: &Operands,
    (count, row): (usize, usize),
    f: impl Fn(f32, f32) -> f32 + Copy,
) {
    // SAFETY: the caller's.
    unsafe {
        rows::<ONE, N>(of, count, row, |r, number, lanes| {
            let d = std::slice::from_raw_parts_mut(d.add(r * row), row);
            let all = d.iter_mut().enumerate();
            match ADDEND {
                NONE => all.for_each(|(i, d)| *d = lane(number, &lanes, i, f)),
                NUMBER => {
                    let addend = *of[MOST + 1].add(r);
                    all.for_each(|(i, d)| *d = lane(number, &lanes, i, f) + addend);
                }
                _ => {
                    let addend = of[MOST + 1].add(r * row);
                    all.for_each(|(i, d)| *d = lane(number, &lanes, i, f) + *addend.add(i));
                }
            }
        });
    }
}

/// The sum of each row's products, in the order of [`super::fold`].
///
/// # Safety
/// As [`Many`] and the form say; the destination has a number for each row.
#[inline(always)]
pub unsafe fn sums<const ONE: bool, const N: usize>(d: *mut f32, of: &Operands, count: usize, row: usize) {
    // SAFETY: the caller's.
    unsafe {
        rows::<ONE, N>(of, count, row, |r, number, lanes| {
            *d.add(r) = super::fold(row, |i| lane(number, &lanes, i, |x, y| x * y), 0.0, |x, y| x + y);
        });
    }
}
