//! Linear layers and what they read, in either arithmetic.

use crate::dequant::{TensorType, dequantise};
use crate::int8;
use crate::int8::rows::{Rows, Writer};
use crate::isa::Isa;
use crate::linear::{self, Matrix};
use crate::team::{Split, Team};
use std::fmt;

/// How a model computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Weights, activations and KV of f32: the reference.
    Exact,
    /// Weights of 4 or 8 bits, activations of 8 in linear layers, KV of f16.
    Int8,
}

impl Arithmetic {
    /// Bytes of a number of KV.
    pub fn kv_number_bytes(self) -> usize {
        match self {
            Self::Exact => 4,
            Self::Int8 => 2,
        }
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
        })
    }
}

/// The weights of one output, as a file has them.
pub type Row<'a> = (TensorType, &'a [u8]);

/// A linear layer.
pub enum Linear {
    Exact(linear::Linear),
    Int8(int8::Linear),
}

impl Linear {
    /// Takes the weights of each output.
    pub fn new(arithmetic: Arithmetic, inputs: usize, rows: &[Row<'_>]) -> Self {
        match arithmetic {
            Arithmetic::Exact => Self::Exact(linear::Linear::new(inputs, rows.len(), |output, row| {
                let (kind, bytes) = rows[output];
                dequantise(kind, bytes, row);
            })),
            Arithmetic::Int8 => Self::Int8(int8::Linear::new(inputs, rows)),
        }
    }

    /// Copies the weights of one output.
    pub fn copy_row(&self, output: usize, out: &mut [f32]) {
        match self {
            Self::Exact(linear) => linear.copy_row(output, out),
            Self::Int8(linear) => linear.copy_row(output, out),
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Exact(linear) => linear.bytes(),
            Self::Int8(linear) => linear.bytes(),
        }
    }

    /// `out = x * weights`, for all rows of `x`.
    pub fn apply(&self, team: &mut Team, isa: Isa, x: &Inputs, out: &mut Matrix) {
        match self {
            Self::Exact(linear) => linear.apply(team, &x.numbers, out),
            Self::Int8(linear) => linear.apply(team, isa, &x.quants, out),
        }
    }
}

/// What linear layers read.
pub struct Inputs {
    arithmetic: Arithmetic,
    numbers: Matrix,
    /// The numbers, quantised; unused in exact arithmetic.
    quants: Rows,
}

impl Inputs {
    pub fn new(arithmetic: Arithmetic) -> Self {
        Self { arithmetic, numbers: Matrix::default(), quants: Rows::default() }
    }

    /// Gives it another shape; every row is to be filled then.
    pub fn resize(&mut self, rows: usize, width: usize) {
        self.numbers.resize(rows, width);
        if self.arithmetic == Arithmetic::Int8 {
            self.quants.resize(rows, width);
        }
    }

    pub fn stride(&self) -> usize {
        self.numbers.stride()
    }

    /// For parts that fill different rows.
    pub fn filler(&mut self) -> Filler<'_> {
        let stride = self.numbers.stride();
        let quants = (self.arithmetic == Arithmetic::Int8).then(|| self.quants.writer());
        Filler { width: self.numbers.width(), stride, numbers: self.numbers.split(), quants }
    }
}

/// Fills rows from several threads.
pub struct Filler<'a> {
    width: usize,
    stride: usize,
    numbers: Split<'a>,
    quants: Option<Writer<'a>>,
}

impl<'a> Filler<'a> {
    /// All rows, `Inputs::stride` apart.
    pub fn numbers(&self) -> &Split<'a> {
        &self.numbers
    }

    /// Some numbers of a row, before it is complete.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, row: usize, columns: std::ops::Range<usize>) -> &mut [f32] {
        assert!(columns.end <= self.width, "columns {columns:?} of {}", self.width);
        let start = row * self.stride;
        // SAFETY: what the caller promises.
        unsafe { self.numbers.part(start + columns.start..start + columns.end) }
    }

    /// Lets `fill` write a row, or the rest of one, and completes it.
    ///
    /// # Safety
    /// Nobody else uses this row meanwhile.
    pub unsafe fn fill(&self, row: usize, fill: impl FnOnce(&mut [f32])) {
        // SAFETY: what the caller promises.
        unsafe {
            let numbers = self.part(row, 0..self.width);
            fill(numbers);
            if let Some(quants) = &self.quants {
                quants.put(row, numbers);
            }
        }
    }
}
