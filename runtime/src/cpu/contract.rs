//! Contractions by matrix products: the loops are sorted by the operands that have them, neighbours are merged, the
//! longest of the rows and of the columns go to the product with all that is summed, and the others run around it.

use ir::DType;
use ir::kernel::Contract;

use super::layout::{Extents, count, merged, points, strides};
#[cfg(target_arch = "x86_64")]
use super::product::bf16;
use super::product::{self, Side, level};

/// A length, and the strides in the operands and the result: a, b, out.
type Dim = (usize, [usize; 3]);

const NONE: Dim = (1, [0; 3]);

/// A contraction, planned for one rank.
pub struct Plan {
    /// Loops around the product, all of them the result's.
    around: Vec<Dim>,
    product: Product,
    /// Bytes of an element of a, b and the result.
    bytes: [usize; 3],
    /// How many elements the result has.
    count: usize,
    /// Whether nothing is summed at all.
    empty: bool,
    multiplications: f64,
}

/// On f32, or on bf16 numbers as they are.
enum Product {
    F32(product::Plan),
    #[cfg(target_arch = "x86_64")]
    BF16(bf16::Plan),
}

/// Plans a contraction over these extents, with these types of both operands and the result.
pub fn plan(contract: &Contract, types: [DType; 3], extents: &Extents) -> Plan {
    let lens = extents.lens();
    let of = [
        strides(&contract.a, &extents.reads[0]),
        strides(&contract.b, &extents.reads[1]),
        strides(&contract.out, &extents.writes[0]),
    ];
    let mut kinds: [Vec<Dim>; 8] = Default::default();
    let mut scale = contract.scale;
    for (l, len) in lens.iter().enumerate().filter(|(_, len)| **len != 1) {
        let dim = (*len, [of[0][l], of[1][l], of[2][l]]);
        let has = |i: usize, access: &ir::kernel::Access| {
            usize::from(access.iter().flatten().any(|f| *f == l)) << i
        };
        match has(0, &contract.a) | has(1, &contract.b) | has(2, &contract.out) {
            // A loop that nothing has repeats the sum.
            0 => scale *= *len as f64,
            kind => kinds[kind].push(dim),
        }
    }
    // What is summed keeps an order that no length changes, so that sums have the same bits with more rows or columns.
    let mut summed: Vec<Dim> = Vec::new();
    for kind in [0b011, 0b001, 0b010] {
        let dims = &mut kinds[kind];
        dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[usize::from(kind & 1 == 0)]));
        summed.append(dims);
    }
    let summed: Vec<_> = merged(summed).into_iter().map(|(len, [a, b, _])| (len, [a, b])).collect();
    for dims in &mut kinds {
        dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[2]));
        *dims = merged(std::mem::take(dims));
    }
    let mut longest = |kind: usize| -> Dim {
        let found = (0..kinds[kind].len()).max_by_key(|i| kinds[kind][*i].0);
        found.map_or(NONE, |i| kinds[kind].remove(i))
    };
    let [m, n] = [longest(0b101), longest(0b110)];
    let mut around: Vec<Dim> = kinds.into_iter().flatten().collect();
    around.sort_by_key(|(_, s)| std::cmp::Reverse(s[2]));
    let side = |(len, strides): Dim, operand: usize| Side { len, operand: strides[operand], out: strides[2] };
    let size = |l: &usize, access: &ir::kernel::Access| access.iter().flatten().any(|f| f == l);
    let empty = (0..lens.len()).any(|l| lens[l] == 0 && !size(&l, &contract.out));
    let (rows, columns, scale) = (side(m, 0), side(n, 1), scale as f32);
    let wide = || Product::F32(product::plan(level::best(), rows, columns, &summed, scale));
    #[cfg(target_arch = "x86_64")]
    let product = if types[..2] == [DType::BF16; 2] && !empty {
        let narrow = types[2] == DType::BF16;
        bf16::plan(rows, columns, &summed, scale, narrow).map_or_else(wide, Product::BF16)
    } else {
        wide()
    };
    #[cfg(not(target_arch = "x86_64"))]
    let product = wide();
    Plan {
        around,
        bytes: match product {
            Product::F32(_) => [4; 3],
            #[cfg(target_arch = "x86_64")]
            Product::BF16(_) => types.map(DType::bytes),
        },
        product,
        count: count(&contract.out, &lens),
        empty,
        multiplications: lens.iter().map(|n| *n as f64).product(),
    }
}

impl Plan {
    /// Operations on numbers.
    pub fn flops(&self) -> f64 {
        2.0 * self.multiplications
    }

    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        match &self.product {
            Product::F32(product) => product.scratch_bytes(),
            #[cfg(target_arch = "x86_64")]
            Product::BF16(product) => product.scratch_bytes(),
        }
    }

    /// Whether it reads and writes the types that it was planned for, or else f32.
    pub fn direct(&self) -> bool {
        match self.product {
            Product::F32(_) => false,
            #[cfg(target_arch = "x86_64")]
            Product::BF16(_) => true,
        }
    }

    /// Runs it; if it `adds`, to what is there.
    ///
    /// # Safety
    /// The operands and the result are of the types of [`Plan::direct`] and as large as planned; the result overlaps no
    /// operand; the scratch is as large as planned and aligned to 64 bytes.
    pub unsafe fn run(&self, a: *const u8, b: *const u8, out: *mut u8, scratch: *mut u8, adds: bool) {
        // SAFETY: the caller's; offsets are of elements on this rank.
        unsafe {
            if self.count == 0 {
                return;
            }
            if self.empty && adds {
                return;
            }
            if self.empty {
                return std::slice::from_raw_parts_mut(out, self.count * self.bytes[2]).fill(0);
            }
            let [of_a, of_b, of_out] = self.bytes;
            let one = |a: *const u8, b: *const u8, out: *mut u8, next: Option<[*const u8; 2]>| match (
                &self.product,
                next,
            ) {
                (Product::F32(product), Some(next)) => {
                    let next = next.map(<*const u8>::cast);
                    product.run_before(next, a.cast(), b.cast(), out.cast(), scratch.cast(), adds);
                }
                (Product::F32(product), None) => {
                    product.run(a.cast(), b.cast(), out.cast(), scratch.cast(), adds);
                }
                #[cfg(target_arch = "x86_64")]
                (Product::BF16(product), Some(_) | None) => {
                    product.run(a.cast(), b.cast(), out, scratch, adds)
                }
            };
            // Each waits until it is known what comes next.
            let mut waits: Option<(*const u8, *const u8, *mut u8)> = None;
            points(&self.around, |_, [oa, ob, oc]| {
                let (a, b, out) = (a.add(oa * of_a), b.add(ob * of_b), out.add(oc * of_out));
                if let Some((x, y, to)) = waits.replace((a, b, out)) {
                    one(x, y, to, Some([a, b]));
                }
            });
            if let Some((a, b, out)) = waits {
                one(a, b, out, None);
            }
        }
    }
}
