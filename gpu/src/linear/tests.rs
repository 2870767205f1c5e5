use super::*;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

fn layer(inputs: usize, outputs: usize) -> Linear {
    let weights = numbers(inputs * outputs, 1);
    Linear::new(inputs, outputs, |output, row| row.copy_from_slice(&weights[output * inputs..][..inputs]))
}

fn rows_of(x: &[Vec<f32>]) -> Matrix {
    let mut matrix = Matrix::new(x.len(), x[0].len());
    x.iter().enumerate().for_each(|(i, row)| matrix.row_mut(i).copy_from_slice(row));
    matrix
}

fn applied(layer: &Linear, x: &[Vec<f32>], team: &mut Team) -> Vec<Vec<u32>> {
    let mut out = Matrix::default();
    layer.apply(team, &rows_of(x), &mut out);
    (0..x.len()).map(|i| out.row(i).iter().map(|n| n.to_bits()).collect()).collect()
}

#[test]
fn a_product_agrees_with_f64() {
    let (inputs, outputs) = (1100, 75);
    let weights = numbers(inputs * outputs, 1);
    let x = vec![numbers(inputs, 2), numbers(inputs, 3), numbers(inputs, 4)];
    let out = applied(&layer(inputs, outputs), &x, &mut Team::new(2).unwrap());
    for (x, out) in x.iter().zip(&out) {
        for (weights, out) in weights.chunks(inputs).zip(out) {
            let right: f64 = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            assert!((right - f64::from(f32::from_bits(*out))).abs() < 1e-3);
        }
    }
}

/// The shapes of the small real model, narrow and odd ones, and inner dimensions around the depth of one product.
const SHAPES: [(usize, usize); 10] =
    [(576, 960), (576, 576), (576, 3072), (1536, 576), (64, 267), (3, 5), (96, 64), (511, 17), (513, 33), (1025, 80)];

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_number_of_rows() {
    let (mut one, mut two) = (Team::new(1).unwrap(), Team::new(2).unwrap());
    for (inputs, outputs) in SHAPES {
        let layer = layer(inputs, outputs);
        let x: Vec<_> = (0..130).map(|row| numbers(inputs, row)).collect();
        let alone: Vec<_> =
            x.iter().map(|row| applied(&layer, std::slice::from_ref(row), &mut one).remove(0)).collect();
        for count in (1..=66).chain([127, 128, 129, 130]) {
            assert!(applied(&layer, &x[..count], &mut one) == alone[..count], "{inputs}x{outputs}: {count} rows");
        }
        for count in [1, 2, 3, 16, 65, 130] {
            // Other neighbours, another place in the batch, another number of threads.
            let from = 130 - count;
            assert!(applied(&layer, &x[from..], &mut two) == alone[from..], "{inputs}x{outputs}: {count} rows");
        }
    }
}

#[test]
fn five_hundred_rows_have_the_bits_of_each_alone() {
    let (mut one, mut two) = (Team::new(1).unwrap(), Team::new(2).unwrap());
    for (inputs, outputs) in [(576, 960), (1536, 576)] {
        let layer = layer(inputs, outputs);
        let x: Vec<_> = (0..512).map(|row| numbers(inputs, row)).collect();
        let together = applied(&layer, &x, &mut two);
        assert!(together == applied(&layer, &x, &mut one));
        for row in (0..512).step_by(37).chain([511]) {
            assert!(applied(&layer, &x[row..=row], &mut one)[0] == together[row], "{inputs}x{outputs}: row {row}");
        }
    }
}

#[test]
fn a_neighbour_that_is_not_finite_leaves_a_row_as_it_is() {
    let mut team = Team::new(1).unwrap();
    let layer = layer(96, 64);
    let x = vec![numbers(96, 1), vec![f32::NAN; 96], numbers(96, 2)];
    let out = applied(&layer, &x, &mut team);
    assert!(out[0] == applied(&layer, &x[..1], &mut team)[0] && out[2] == applied(&layer, &x[2..], &mut team)[0]);
}

#[test]
fn tiles_cover_the_rows_and_none_is_a_single_row() {
    for rows in 2..400 {
        let mut next = 0;
        for (first, count) in tiles(rows) {
            assert!(first == next && (2..=TILE_ROWS).contains(&count), "{rows} rows: {count} from {first}");
            next += count;
        }
        assert_eq!(next, rows);
    }
}

#[test]
fn rows_of_weights_come_back() {
    let layer = layer(96, 75);
    let weights = numbers(96 * 75, 1);
    let mut row = vec![0.0; 96];
    for output in [0, 1, 63, 64, 74] {
        layer.copy_row(output, &mut row);
        assert_eq!(row, weights[output * 96..][..96]);
    }
}
