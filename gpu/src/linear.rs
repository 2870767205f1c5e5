//! Linear layers of the exact mode: f32 weights and matrix products by the gemm crate.
//!
//! A row's result must not depend on the rows beside it, nor on threads. The crate computes each element of a product
//! as one chain of fused operations along the inner dimension, as long as it takes its blocked path with one block; so
//! each call here has between 2 and `TILE_ROWS` rows (a single row would take another path), a panel of at most
//! `PANEL` outputs, at most `DEPTH` of the inner dimension, and one thread. The tests check the bits.

use crate::team::{Split, Team};

mod narrow;
#[cfg(test)]
mod tests;

/// Outputs of a panel: a few register tiles of the crate's kernels. Panels are what threads share out.
const PANEL: usize = 64;
/// Outputs are padded to this multiple, the widest vector of the crate's kernels.
const PADDING: usize = 16;
/// Rows of one product. With `PANEL`, small enough that the crate does not choose blocks by the sizes of caches.
const TILE_ROWS: usize = 64;
/// Inner dimension of one product: the crate's smallest block, so that it never cuts on its own.
const DEPTH: usize = 512;

/// Rows of activations.
///
/// # Shape
/// `rows` rows of `stride` numbers each, of which the first `width` mean something. There is memory for two rows at
/// least, as a product of one row is computed as one of two.
#[derive(Default)]
pub struct Matrix {
    rows: usize,
    width: usize,
    stride: usize,
    numbers: Vec<f32>,
}

impl Matrix {
    #[cfg(test)]
    pub fn new(rows: usize, width: usize) -> Self {
        let mut matrix = Self::default();
        matrix.resize(rows, width);
        matrix
    }

    /// Gives it another shape and keeps the memory; what it holds then is unspecified, but for being initialised.
    pub fn resize(&mut self, rows: usize, width: usize) {
        self.rows = rows;
        self.width = width;
        self.stride = width.next_multiple_of(PADDING);
        let needed = rows.max(2) * self.stride;
        if self.numbers.len() < needed {
            self.numbers.resize(needed, 0.0);
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.numbers[row * self.stride..][..self.width]
    }

    /// The memory from one row to the end of the last.
    pub fn tail(&self, row: usize) -> &[f32] {
        &self.numbers[row * self.stride..self.rows * self.stride]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &mut self.numbers[row * self.stride..][..self.width]
    }

    /// For parts that write different rows, or different columns.
    pub fn split(&mut self) -> Split<'_> {
        Split::new(&mut self.numbers)
    }
}

/// The weights of a linear layer.
///
/// # Shape
/// Panels of `PANEL` outputs (the last one narrower), each `inputs` times its width: for each input the weights of the
/// panel's outputs. Outputs are padded with zero weights to a multiple of `PADDING`.
pub struct Linear {
    inputs: usize,
    outputs: usize,
    panels: Vec<f32>,
}

impl Linear {
    /// Takes the weights row by row: `fill(output, row)` writes the weights of one output.
    pub fn new(inputs: usize, outputs: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        assert!(inputs > 0 && outputs > 0, "a layer of {inputs} x {outputs}");
        let padded = outputs.next_multiple_of(PADDING);
        let mut panels = vec![0.0; padded * inputs];
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            fill(output, &mut row);
            let (panel, column) = (output / PANEL, output % PANEL);
            let width = PANEL.min(padded - panel * PANEL);
            let panel = &mut panels[panel * PANEL * inputs..][..inputs * width];
            for (weights, weight) in panel.chunks_exact_mut(width).zip(&row) {
                weights[column] = *weight;
            }
        }
        Self { inputs, outputs, panels }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.panels)
    }

    /// Copies the weights of one output.
    pub fn copy_row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        let (panel, column) = (output / PANEL, output % PANEL);
        let (panel, width) = self.panel(panel);
        for (out, weights) in out.iter_mut().zip(panel.chunks_exact(width)) {
            *out = weights[column];
        }
    }

    fn panel(&self, index: usize) -> (&[f32], usize) {
        let padded = self.outputs.next_multiple_of(PADDING);
        let width = PANEL.min(padded - index * PANEL);
        (&self.panels[index * PANEL * self.inputs..][..self.inputs * width], width)
    }

    /// `out = x * weights`, for all rows of `x`.
    pub fn apply(&self, team: &mut Team, x: &Matrix, out: &mut Matrix) {
        assert_eq!(x.width, self.inputs, "inputs");
        out.resize(x.rows, self.outputs);
        let stride = out.stride;
        let rows = x.rows.max(2);
        let out = out.split();
        if x.rows == 0 {
            return;
        }
        let is_narrow = x.rows <= narrow::ROWS_MAX && narrow::is_available();
        team.run(self.outputs.div_ceil(PANEL), |index| {
            let (panel, width) = self.panel(index);
            if is_narrow && width == PANEL {
                // SAFETY: every row has memory, and only this part writes these columns.
                return unsafe { narrow_product(panel, x, (out.address(index * PANEL), stride)) };
            }
            for (first, count) in tiles(rows) {
                let x = &x.numbers[first * x.stride..(first + count) * x.stride];
                // The columns of this panel, in the rows of this tile.
                let out = out.address(first * stride + index * PANEL);
                // SAFETY: every row up to `rows` has memory, and only this part writes these columns.
                unsafe { product((panel, width), (x, count, self.inputs), (out, stride)) };
            }
        });
    }
}

/// Cuts the inner dimension into equal blocks of at most `DEPTH`: where each begins, and how long it is.
fn blocks(inputs: usize) -> impl Iterator<Item = (usize, usize)> {
    let depth = inputs.div_ceil(inputs.div_ceil(DEPTH));
    (0..inputs).step_by(depth).map(move |start| (start, depth.min(inputs - start)))
}

/// One full panel times a few rows.
///
/// # Safety
/// `out` points to as many rows as `x` has, `out_stride` numbers apart, of `PANEL` numbers that nobody else uses, and the
/// processor has what `narrow` needs.
unsafe fn narrow_product(panel: &[f32], x: &Matrix, (out, out_stride): (*mut f32, usize)) {
    for (start, depth) in blocks(x.width) {
        let mut rows: [&[f32]; narrow::ROWS_MAX] = [&[]; narrow::ROWS_MAX];
        for (row, slot) in rows.iter_mut().enumerate().take(x.rows) {
            *slot = &x.row(row)[start..start + depth];
        }
        let weights = &panel[start * PANEL..(start + depth) * PANEL];
        // SAFETY: what the caller promises.
        unsafe { narrow::product(weights, &rows[..x.rows], (out, out_stride), start > 0) };
    }
}

/// Cuts rows into tiles of 2 to `TILE_ROWS`.
fn tiles(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let left = rows - first;
        let count = match left {
            0 => return None,
            // One row must not be left alone.
            _ if left == TILE_ROWS + 1 => TILE_ROWS - 1,
            _ => left.min(TILE_ROWS),
        };
        first += count;
        Some((first - count, count))
    })
}

/// One panel times one tile of rows.
///
/// # Safety
/// `out` points to `rows` rows, `out_stride` numbers apart, of at least `width` numbers that nobody else uses.
unsafe fn product(
    (panel, width): (&[f32], usize),
    (x, rows, inputs): (&[f32], usize, usize),
    (out, out_stride): (*mut f32, usize),
) {
    let x_stride = x.len() / rows;
    assert!(panel.len() == inputs * width && x_stride >= inputs && rows >= 2);
    for (start, depth) in blocks(inputs) {
        // SAFETY: `panel` and `x` hold what the asserts say, and `out` what the caller promises.
        unsafe {
            gemm::gemm(
                width,
                rows,
                depth,
                out,
                out_stride as isize,
                1,
                start > 0,
                panel[start * width..].as_ptr(),
                width as isize,
                1,
                x[start..].as_ptr(),
                x_stride as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
