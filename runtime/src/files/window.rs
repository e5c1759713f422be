//! A strided window into a row-major tensor, and pieces of it copied out and in.
//!
//! A parameter of a model is often a part of a tensor in a file, or one read with its dimensions exchanged:
//!
//! ```text
//! c_attn.weight : 64x192 in the file
//! query  = offset   0, dims [(64, 192), (64, 1)]     the first third of its columns
//! key    = offset  64, dims [(64, 192), (64, 1)]     the second
//! queryT = offset   0, dims [(64, 1), (64, 192)]     the first third, transposed

use half::{bf16, f16};
use std::ops::Range;
use thiserror::Error;

/// A strided view of a row-major tensor. Offset and strides count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The element of the tensor at which the window's first element stands.
    pub offset: usize,
    /// A `(size, stride)` for each dimension of the window, outermost first.
    pub dims: Vec<(usize, usize)>,
}

/// What an element in a file may be, to be read as f32. F64 is rounded to nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// 4 bytes, taken as they are.
    F32,
    /// 2 bytes, the upper half of an f32.
    Bf16,
    /// 2 bytes, IEEE half precision.
    F16,
    /// 8 bytes, rounded.
    F64,
}

/// Why a piece cannot be copied.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)] // the messages say what the fields are
pub enum WindowError {
    /// One range for each dimension is needed.
    #[error("the window has {dims} dimensions, but {ranges} ranges are given")]
    Rank { dims: usize, ranges: usize },

    /// A range leaves the window.
    #[error("dimension {dim} of the window is {size}, and {start}..{end} is no range of it")]
    Range { dim: usize, start: usize, end: usize, size: usize },

    /// The piece and the place for it differ in size.
    #[error("the piece is {is} elements, but {needed} are needed")]
    Piece { is: usize, needed: usize },

    /// The window leaves the tensor.
    #[error("the window reaches element {last}, but the tensor has {elements} elements")]
    Outside { last: usize, elements: usize },

    /// Positions that no tensor has.
    #[error("the window is larger than memory: offset {offset}, dims {dims:?}")]
    Overflow { offset: usize, dims: Vec<(usize, usize)> },
}

impl Window {
    /// The window that is the whole tensor.
    pub fn whole(shape: &[usize]) -> Window {
        let mut stride = 1usize;
        let mut dims: Vec<_> = shape
            .iter()
            .rev()
            .map(|&size| {
                let dim = (size, stride);
                stride = stride.saturating_mul(size);
                dim
            })
            .collect();
        dims.reverse();
        Window { offset: 0, dims }
    }

    /// The range of every dimension that takes all of it.
    pub fn all(&self) -> Vec<Range<usize>> {
        self.dims.iter().map(|&(size, _)| 0..size).collect()
    }

    /// The last element of the tensor that the window reaches; `None` for an empty window.
    fn last(&self) -> Result<Option<usize>, WindowError> {
        if self.dims.iter().any(|&(size, _)| size == 0) {
            return Ok(None);
        }
        let mut last = Some(self.offset);
        for &(size, stride) in &self.dims {
            last = last.and_then(|last| last.checked_add((size - 1).checked_mul(stride)?));
        }
        last.map(Some).ok_or_else(|| self.overflow())
    }

    fn overflow(&self) -> WindowError {
        WindowError::Overflow { offset: self.offset, dims: self.dims.clone() }
    }
}

/// Copies the piece `ranges` of `window` out of `file`, the little-endian bytes of a whole tensor, into
/// `out`, dense and row-major.
pub fn copy_out(
    window: &Window,
    ranges: &[Range<usize>],
    file: &[u8],
    element: Element,
    out: &mut [f32],
) -> Result<(), WindowError> {
    match element {
        Element::F32 => gather(window, ranges, file, out, f32::from_le_bytes),
        Element::Bf16 => gather(window, ranges, file, out, |b| bf16::from_le_bytes(b).to_f32()),
        Element::F16 => gather(window, ranges, file, out, |b| f16::from_le_bytes(b).to_f32()),
        Element::F64 => gather(window, ranges, file, out, |b| f64::from_le_bytes(b) as f32),
    }
}

/// Copies `piece`, dense and row-major, into the places `ranges` of `window` in `tensor`, which is whole.
pub fn copy_in(
    window: &Window,
    ranges: &[Range<usize>],
    piece: &[f32],
    tensor: &mut [f32],
) -> Result<(), WindowError> {
    let runs = Runs::of(window, ranges, tensor.len(), piece.len())?;
    let mut rows = piece.chunks_exact(runs.len.max(1));
    runs.for_each(|at| {
        let row = rows.next().unwrap_or_default();
        if runs.stride == 1 {
            tensor[at..at + row.len()].copy_from_slice(row);
        } else {
            for (i, &value) in row.iter().enumerate() {
                tensor[at + i * runs.stride] = value;
            }
        }
    });
    Ok(())
}

fn gather<const N: usize>(
    window: &Window,
    ranges: &[Range<usize>],
    file: &[u8],
    out: &mut [f32],
    convert: impl Fn([u8; N]) -> f32,
) -> Result<(), WindowError> {
    let (tensor, _) = file.as_chunks::<N>();
    let runs = Runs::of(window, ranges, tensor.len(), out.len())?;
    let mut rows = out.chunks_exact_mut(runs.len.max(1));
    runs.for_each(|at| {
        let row = rows.next().unwrap_or_default();
        if runs.stride == 1 {
            for (value, &bytes) in row.iter_mut().zip(&tensor[at..]) {
                *value = convert(bytes);
            }
        } else {
            for (value, &bytes) in row.iter_mut().zip(tensor[at..].iter().step_by(runs.stride.max(1))) {
                *value = convert(bytes);
            }
        }
    });
    Ok(())
}

/// A piece as runs of `len` elements that stand `stride` apart; as few and as long as possible. The piece
/// holds them one after the other.
pub(crate) struct Runs {
    start: usize,
    /// `(size, stride)`, outermost first.
    outer: Vec<(usize, usize)>,
    pub(crate) len: usize,
    pub(crate) stride: usize,
}

impl Runs {
    /// Checked: the window lies in a tensor of `elements`, the ranges in the window, and the piece is `room`
    /// elements.
    pub(crate) fn of(
        window: &Window,
        ranges: &[Range<usize>],
        elements: usize,
        room: usize,
    ) -> Result<Runs, WindowError> {
        if ranges.len() != window.dims.len() {
            return Err(WindowError::Rank { dims: window.dims.len(), ranges: ranges.len() });
        }
        if let Some(last) = window.last()?.filter(|&last| last >= elements) {
            return Err(WindowError::Outside { last, elements });
        }
        let mut count = 1usize;
        for (dim, (range, &(size, _))) in ranges.iter().zip(&window.dims).enumerate() {
            if range.start > range.end || range.end > size {
                return Err(WindowError::Range { dim, start: range.start, end: range.end, size });
            }
            // A window may repeat elements with stride 0, so it can be larger than its tensor.
            count = count.checked_mul(range.len()).ok_or_else(|| window.overflow())?;
        }
        if count != room {
            return Err(WindowError::Piece { is: room, needed: count });
        }
        if count == 0 {
            return Ok(Runs { start: 0, outer: vec![(0, 0)], len: 0, stride: 1 });
        }

        let mut start = window.offset;
        let mut outer: Vec<(usize, usize)> = Vec::new();
        for (range, &(_, stride)) in ranges.iter().zip(&window.dims) {
            start += range.start * stride;
            match outer.last_mut() {
                _ if range.len() == 1 => {}
                Some(last) if last.1 == range.len() * stride => *last = (last.0 * range.len(), stride),
                Some(_) | None => outer.push((range.len(), stride)),
            }
        }
        let (len, stride) = outer.pop().unwrap_or((1, 1));
        Ok(Runs { start, outer, len, stride })
    }

    /// Calls `f` with the element of the tensor at which each run begins, in the order of the piece.
    pub(crate) fn for_each(&self, mut f: impl FnMut(usize)) {
        let count: usize = self.outer.iter().map(|&(size, _)| size).product();
        let mut index = vec![0; self.outer.len()];
        let mut at = self.start;
        for _ in 0..count {
            f(at);
            for (index, &(size, stride)) in index.iter_mut().zip(&self.outer).rev() {
                *index += 1;
                at += stride;
                if *index < size {
                    break;
                }
                *index = 0;
                at -= size * stride;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a piece of one dimension has one range
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window(offset: usize, dims: &[(usize, usize)]) -> Window {
        Window { offset, dims: dims.to_vec() }
    }

    fn f32_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn pieces_of_a_4x6_tensor() {
        let tensor: Vec<f32> = (0..24).map(|i| i as f32).collect();
        type Case<'a> = (Window, &'a [Range<usize>], &'a [usize]);
        let table: &[Case<'_>] = &[
            (Window::whole(&[4, 6]), &[0..1, 0..6], &[0, 1, 2, 3, 4, 5]),
            (Window::whole(&[4, 6]), &[1..3, 2..4], &[8, 9, 14, 15]),
            (Window::whole(&[4, 6]), &[2..2, 0..6], &[]),
            (window(3, &[(4, 6), (3, 1)]), &[1..3, 0..3], &[9, 10, 11, 15, 16, 17]),
            (window(0, &[(6, 1), (4, 6)]), &[1..3, 0..4], &[1, 7, 13, 19, 2, 8, 14, 20]),
            (window(23, &[]), &[], &[23]),
            (window(1, &[(2, 0), (3, 1)]), &[0..2, 1..3], &[2, 3, 2, 3]),
            (window(5, &[(2, 12), (2, 6), (1, 1)]), &[0..2, 0..2, 0..1], &[5, 11, 17, 23]),
        ];
        for (window, ranges, expected) in table {
            let mut out = vec![-1.0; expected.len()];
            copy_out(window, ranges, &f32_bytes(&tensor), Element::F32, &mut out).unwrap();
            assert_eq!(out, expected.iter().map(|&i| i as f32).collect::<Vec<_>>(), "{window:?} {ranges:?}");
            let mut back = vec![-1.0; 24];
            copy_in(window, ranges, &out, &mut back).unwrap();
            for (i, &value) in back.iter().enumerate() {
                assert_eq!(value, if expected.contains(&i) { i as f32 } else { -1.0 });
            }
        }
    }

    #[test]
    fn every_element_type() {
        let values = [1.5f32, -0.25, 3.0, 65504.0, f32::INFINITY, -0.0];
        let bf16s: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        let f16s: Vec<u8> = values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        let f64s: Vec<u8> = values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
        let rounded = bf16::from_f32(65504.0).to_f32();
        let table = [
            (Element::F32, f32_bytes(&values), 65504.0),
            (Element::Bf16, bf16s, rounded),
            (Element::F16, f16s, 65504.0),
            (Element::F64, f64s, 65504.0),
        ];
        for (element, bytes, fourth) in table {
            for w in [Window::whole(&[6]), window(0, &[(3, 2), (2, 1)]), window(0, &[(2, 1), (3, 2)])] {
                let mut out = vec![f32::NAN; 6];
                copy_out(&w, &w.all(), &bytes, element, &mut out).unwrap();
                let mut back = vec![f32::NAN; 6];
                copy_in(&w, &w.all(), &out, &mut back).unwrap();
                assert_eq!(back, [1.5, -0.25, 3.0, fourth, f32::INFINITY, -0.0], "{element:?}");
                assert!(back[5].is_sign_negative());
            }
        }
    }

    #[test]
    fn what_does_not_fit() {
        let huge = usize::MAX / 2;
        let table: &[(Window, &[Range<usize>], usize, &str)] = &[
            (Window::whole(&[2, 2]), &[0..2], 2, "the window has 2 dimensions, but 1 ranges are given"),
            (
                Window::whole(&[2, 2]),
                &[0..2, 1..3],
                4,
                "dimension 1 of the window is 2, and 1..3 is no range of it",
            ),
            (Window::whole(&[2, 2]), &[0..2, 0..2], 3, "the piece is 3 elements, but 4 are needed"),
            (
                Window::whole(&[2, 3]),
                &[0..1, 0..1],
                1,
                "the window reaches element 5, but the tensor has 4 elements",
            ),
            (window(4, &[]), &[], 1, "the window reaches element 4, but the tensor has 4 elements"),
            (
                window(huge, &[(3, huge)]),
                &[0..1],
                1,
                &format!("the window is larger than memory: offset {huge}, dims [(3, {huge})]"),
            ),
        ];
        for (window, ranges, room, message) in table {
            let mut out = vec![0.0; *room];
            let error = copy_out(window, ranges, &[0; 16], Element::F32, &mut out).unwrap_err();
            assert_eq!(error.to_string(), *message);
            assert_eq!(copy_in(window, ranges, &out, &mut [0.0; 4]).unwrap_err(), error);
        }
        #[allow(clippy::reversed_empty_ranges)] // on purpose
        let reversed = copy_in(&Window::whole(&[4]), &[3..1], &[], &mut [0.0; 4]).unwrap_err();
        assert_eq!(reversed.to_string(), "dimension 0 of the window is 4, and 3..1 is no range of it");
    }

    proptest! {
        /// Cut into pieces along every dimension and joined again, a permuted tensor is itself.
        #[test]
        fn pieces_join(sizes in prop::collection::vec(1usize..5, 1..4), cut in 0usize..5, turn in 0usize..3) {
            let whole = Window::whole(&sizes);
            let mut permuted = whole.clone();
            permuted.dims.rotate_left(turn % sizes.len());
            let count: usize = sizes.iter().product();
            let tensor: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let mut joined = vec![-1.0; count];
            let halves: Vec<[Range<usize>; 2]> =
                permuted.dims.iter().map(|&(size, _)| [0..cut.min(size), cut.min(size)..size]).collect();
            for choice in 0..1 << sizes.len() {
                let ranges: Vec<_> = halves.iter().enumerate().map(|(d, half)| half[choice >> d & 1].clone()).collect();
                let mut piece = vec![0.0; ranges.iter().map(Range::len).product()];
                copy_out(&permuted, &ranges, &f32_bytes(&tensor), Element::F32, &mut piece).unwrap();
                copy_in(&permuted, &ranges, &piece, &mut joined).unwrap();
            }
            prop_assert_eq!(joined, tensor);
        }
    }
}
