//! The attention of a step: its KV, and how the work is cut into parts.

use super::ROWS_AT_ONCE;
use super::pool::{Home, Memory, Pool};
use crate::attention::paged::{self, Queries};
use crate::attention::{self, Places, Tile};
use crate::isa::Isa;
use crate::kv::KvPool;
use crate::kv::halves::HalfPool;
use crate::linear::Matrix;
use crate::llama::ModelConfig;
use crate::team::{Split, Team};
use crate::weights::Inputs;
use starling_core::step::Step;
use std::ops::Range;

/// Positions of a query tile: enough to reuse keys and values, few enough to share out.
const TILE_ROWS: usize = 16;
/// A tile of up to so many rows is cut at its segments: decoding, where a sequence is one tile of each head.
const FEW_ROWS: usize = 4;
/// Parts for each thread below which larger tiles are cut too.
const PARTS_PER_THREAD: usize = 8;

/// Consecutive rows of one slice.
struct SliceTile {
    slice: usize,
    /// Row in the step, and position in the sequence, of the first.
    row: usize,
    position: usize,
    rows: usize,
}

/// Work of one thread: some segments of a tile and a kv head. Which segments go together does not change results.
struct Unit {
    tile: usize,
    kv_head: usize,
    segments: Range<usize>,
    /// Where its result is. A unit that is a tile's only one has room for a second, and puts its result in its place.
    start: usize,
    is_whole: bool,
}

/// Layers that see the same positions are cut alike.
#[derive(Default)]
struct Cut {
    window: Option<usize>,
    units: Vec<Unit>,
    /// Numbers that hold all results.
    numbers: usize,
}

/// The rows of a step, and how their attention is cut.
#[derive(Default)]
pub(super) struct Mixing {
    /// Slice and position of each row.
    rows: Vec<(usize, usize)>,
    tiles: Vec<SliceTile>,
    cuts: Vec<Cut>,
    results: Vec<f32>,
}

impl Mixing {
    /// Works out where each row is.
    pub fn lay_out(&mut self, step: &Step) {
        self.rows.clear();
        self.tiles.clear();
        self.cuts.clear();
        for (index, slice) in step.slices.iter().enumerate() {
            let start = slice.start as usize;
            for first in (0..slice.tokens.len()).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(slice.tokens.len() - first);
                self.tiles.push(SliceTile {
                    slice: index,
                    row: self.rows.len() + first,
                    position: start + first,
                    rows,
                });
            }
            self.rows.extend((start..start + slice.tokens.len()).map(|position| (index, position)));
        }
    }

    /// Lets `prepare` finish each row of queries, keys and values, and stores the keys and values.
    pub fn write(
        &self,
        team: &mut Team,
        (pool, step, layer): (&mut Pool, &Step, usize),
        (qkv, q_width): (&mut Matrix, usize),
        prepare: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let (rows, width, stride) = (qkv.rows(), qkv.width(), qkv.stride());
        let kv_width = (width - q_width) / 2;
        let split = qkv.split();
        let prepared = |row: usize| {
            // SAFETY: each row is in one part.
            let numbers = unsafe { split.part(row * stride..row * stride + width) };
            prepare(row, numbers);
            numbers
        };
        let Home { life_cycle, index, .. } = pool.home(layer);
        match &mut pool.memory {
            Memory::Exact(pools) => {
                team.run_rows(rows, ROWS_AT_ONCE, |rows| {
                    for row in rows {
                        prepared(row);
                    }
                });
                for (row, &(slice, position)) in self.rows.iter().enumerate() {
                    let (keys, values) = qkv.row(row)[q_width..].split_at(kv_width);
                    let table = &step.slices[slice].tables[life_cycle];
                    pools[life_cycle].write(index, table, position, (keys, values));
                }
            }
            Memory::Int8(pools) => {
                let writer = pools[life_cycle].writer(index);
                team.run_rows(rows, ROWS_AT_ONCE, |rows| {
                    for row in rows {
                        let (slice, position) = self.rows[row];
                        let (keys, values) = prepared(row)[q_width..].split_at(kv_width);
                        // SAFETY: slices write different blocks, as the step was checked for.
                        unsafe { writer.put(&step.slices[slice].tables[life_cycle], position, (keys, values)) };
                    }
                });
            }
        }
    }

    /// Mixes the values that each query sees, and completes the rows of `mixed`.
    pub fn attend(
        &mut self,
        team: &mut Team,
        (pool, step, layer): (&Pool, &Step, usize),
        (sizes, isa): (&ModelConfig, Isa),
        (qkv, mixed): (&Matrix, &mut Inputs),
    ) {
        let home = pool.home(layer);
        match &pool.memory {
            Memory::Exact(pools) => {
                self.attend_exact(team, (&pools[home.life_cycle], step, home), sizes, (qkv, mixed));
            }
            Memory::Int8(pools) => {
                self.attend_halves(team, (&pools[home.life_cycle], step, home), (sizes, isa), (qkv, mixed));
            }
        }
    }

    fn attend_exact(
        &self,
        team: &mut Team,
        (pool, step, home): (&KvPool, &Step, Home),
        sizes: &ModelConfig,
        (qkv, mixed): (&Matrix, &mut Inputs),
    ) {
        let (group, stride) = (sizes.heads / sizes.kv_heads, mixed.stride());
        let filler = mixed.filler();
        team.run(self.tiles.len() * sizes.kv_heads, |part| {
            // Long contexts cost most, and they tend to stand first: kv heads of one tile run one after the other.
            let (tile, kv_head) = (&self.tiles[part / sizes.kv_heads], part % sizes.kv_heads);
            let table = &step.slices[tile.slice].tables[home.life_cycle];
            let column = kv_head * group * sizes.head_dim;
            let queries = Tile {
                scale: sizes.score_scale,
                window: sizes.layers[home.layer].window,
                start: tile.position,
                rows: tile.rows,
                group,
                queries: &qkv.tail(tile.row)[column..],
                stride: qkv.stride(),
            };
            let (start, width) = (tile.row * stride + column, group * sizes.head_dim);
            // SAFETY: no other part has these rows and this kv head.
            let mut places = unsafe { Places::new(filler.numbers(), start, stride, width) };
            attention::attend(pool.head(home.index, kv_head, table), &queries, &mut places);
        });
    }

    fn attend_halves(
        &mut self,
        team: &mut Team,
        (pool, step, home): (&HalfPool, &Step, Home),
        (sizes, isa): (&ModelConfig, Isa),
        (qkv, mixed): (&Matrix, &mut Inputs),
    ) {
        let window = sizes.layers[home.layer].window;
        let (head_dim, group) = (sizes.head_dim, sizes.heads / sizes.kv_heads);
        let cut = self.cut(team.threads(), window, sizes);
        let Self { tiles, cuts, results, .. } = self;
        let cut = &cuts[cut];
        let queries_of = |tile: &SliceTile, kv_head: usize| Queries {
            start: tile.position,
            rows: tile.rows,
            group,
            numbers: &qkv.tail(tile.row)[kv_head * group * head_dim..],
            stride: qkv.stride(),
            scale: sizes.score_scale,
            window,
        };
        let (results, filler) = (Split::new(results), mixed.filler());
        let finish = |result: &paged::Result<'_>, tile: &SliceTile, kv_head: usize| {
            for query in 0..tile.rows * group {
                let (row, column) = (query / group, (kv_head * group + query % group) * head_dim);
                // SAFETY: no other part has this row and head.
                result.finish(query, unsafe { filler.part(tile.row + row, column..column + head_dim) });
            }
        };
        let attend = |unit: &Unit| {
            let tile = &tiles[unit.tile];
            let queries = queries_of(tile, unit.kv_head);
            let table = &step.slices[tile.slice].tables[home.life_cycle];
            let kv = pool.head(home.index, unit.kv_head, table);
            let numbers = queries.result_numbers(head_dim);
            // SAFETY: results of units do not overlap.
            let mut result = paged::Result::new(unsafe { results.part(unit.start..unit.start + numbers) }, head_dim);
            let mut segments = unit.segments.clone();
            paged::attend(isa, kv, &queries, segments.next().expect("a unit has segments"), &mut result);
            for segment in segments {
                // SAFETY: as above; a unit of several segments has room for two.
                let next = unsafe { results.part(unit.start + numbers..unit.start + 2 * numbers) };
                let mut next = paged::Result::new(next, head_dim);
                paged::attend(isa, kv, &queries, segment, &mut next);
                result.merge(&next);
            }
            if unit.is_whole {
                finish(&result, tile, unit.kv_head);
            }
        };
        // The last positions of a prompt see most: the longest units run first.
        team.run(cut.units.len(), |part| attend(&cut.units[cut.units.len() - 1 - part]));
        let complete = |index: usize| {
            let tile = &tiles[index];
            let first = cut.units.partition_point(|unit| unit.tile < index);
            let of_tile = cut.units[first..].iter().take_while(|unit| unit.tile == index);
            let mut merged: Option<(usize, paged::Result<'_>)> = None;
            for unit in of_tile.filter(|unit| !unit.is_whole) {
                let numbers = queries_of(tile, unit.kv_head).result_numbers(head_dim);
                // SAFETY: the units have ended, and only this part reads those of this tile.
                let next = paged::Result::new(unsafe { results.part(unit.start..unit.start + numbers) }, head_dim);
                match &mut merged {
                    Some((kv_head, result)) if *kv_head == unit.kv_head => result.merge(&next),
                    _ => {
                        if let Some((kv_head, result)) = merged.replace((unit.kv_head, next)) {
                            finish(&result, tile, kv_head);
                        }
                    }
                }
            }
            if let Some((kv_head, result)) = merged {
                finish(&result, tile, kv_head);
            }
            for row in tile.row..tile.row + tile.rows {
                // SAFETY: each row is of one tile.
                unsafe { filler.fill(row, |_| ()) };
            }
        };
        let tiles_at_once = (ROWS_AT_ONCE * tiles.len()).div_ceil(qkv.rows().max(1)).max(1);
        team.run_rows(tiles.len(), tiles_at_once, |tiles| tiles.for_each(complete));
    }

    /// The cut of layers with this window, made when the first of them runs.
    fn cut(&mut self, threads: usize, window: Option<usize>, sizes: &ModelConfig) -> usize {
        if let Some(known) = self.cuts.iter().position(|cut| cut.window == window) {
            return known;
        }
        let group = sizes.heads / sizes.kv_heads;
        let are_few = self.tiles.len() * sizes.kv_heads < threads * PARTS_PER_THREAD;
        let mut cut = Cut { window, ..Cut::default() };
        for (index, tile) in self.tiles.iter().enumerate() {
            let (start, rows) = (tile.position, tile.rows);
            let queries = Queries { start, rows, group, numbers: &[], stride: 0, scale: 0.0, window };
            let (all, numbers) = (queries.segments(), queries.result_numbers(sizes.head_dim));
            let is_whole = all.len() == 1 || !(are_few || rows <= FEW_ROWS);
            for kv_head in 0..sizes.kv_heads {
                let mut push = |segments: Range<usize>| {
                    let start = cut.numbers;
                    cut.numbers += numbers * segments.len().min(2);
                    cut.units.push(Unit { tile: index, kv_head, segments, start, is_whole });
                };
                match is_whole {
                    true => push(all.clone()),
                    false => all.clone().for_each(|segment| push(segment..segment + 1)),
                }
            }
        }
        if self.results.len() < cut.numbers {
            self.results.resize(cut.numbers, 0.0);
        }
        self.cuts.push(cut);
        self.cuts.len() - 1
    }
}
