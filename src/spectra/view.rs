//! An array that is read in place: float32 or float64, any strides.

use ndarray::{ArrayView1, ArrayView3, Axis, ShapeBuilder};

use crate::error::{Error, Result, shape_text};

/// Three axes of numbers: token, row, column.
pub struct View<'a> {
    name: &'static str,
    elements: Elements<'a>,
}

/// The numbers of a view, as they are stored.
pub enum Elements<'a> {
    F32(ArrayView3<'a, f32>),
    F64(ArrayView3<'a, f64>),
}

impl<'a> View<'a> {
    /// `name` is the argument's name in sentences about it.
    pub fn new(name: &'static str, elements: Elements<'a>) -> View<'a> {
        View { name, elements }
    }

    /// Views a slice of float64 in C order.
    pub fn of_slice(name: &'static str, shape: [usize; 3], slice: &'a [f64]) -> Result<View<'a>> {
        match ArrayView3::from_shape(shape.into_shape_with_order(), slice) {
            Ok(array) => Ok(View::new(name, Elements::F64(array))),
            Err(_) => Err(Error::Argument(format!(
                "`{name}` must have the elements of shape {}, got {}",
                shape_text(&shape),
                slice.len()
            ))),
        }
    }

    pub fn shape(&self) -> [usize; 3] {
        let shape = match &self.elements {
            Elements::F32(array) => array.dim(),
            Elements::F64(array) => array.dim(),
        };
        shape.into()
    }

    /// Refuses another shape.
    pub fn require_shape(&self, expected: [usize; 3]) -> Result<()> {
        if self.shape() == expected {
            return Ok(());
        }
        Err(Error::Shape { name: self.name, expected: shape_text(&expected), got: shape_text(&self.shape()) })
    }

    /// Loads the numbers `[token, row, ..]` and refuses NaN and infinity.
    pub fn load_row(&self, token: usize, row: usize, to: &mut [f64]) -> Result<()> {
        self.load(token, Axis(0), row, to)
    }

    /// Loads the numbers `[token, .., column]` and refuses NaN and infinity.
    pub fn load_column(&self, token: usize, column: usize, to: &mut [f64]) -> Result<()> {
        self.load(token, Axis(1), column, to)
    }

    fn load(&self, token: usize, axis: Axis, at: usize, to: &mut [f64]) -> Result<()> {
        match &self.elements {
            Elements::F32(array) => widen(array.index_axis(Axis(0), token).index_axis(axis, at), to),
            Elements::F64(array) => widen(array.index_axis(Axis(0), token).index_axis(axis, at), to),
        }
        match to.iter().find(|number| !number.is_finite()) {
            Some(number) => Err(self.refuse(token, "be finite", number)),
            None => Ok(()),
        }
    }

    /// Loads all rows of a token, one after another.
    pub fn load_rows(&self, token: usize, to: &mut [f64]) -> Result<()> {
        let [_, rows, width] = self.shape();
        (0..rows).try_for_each(|row| self.load_row(token, row, &mut to[row * width..][..width]))
    }

    /// Loads all columns of a token, one after another.
    pub fn load_columns(&self, token: usize, to: &mut [f64]) -> Result<()> {
        let [_, height, columns] = self.shape();
        (0..columns)
            .try_for_each(|column| self.load_column(token, column, &mut to[column * height..][..height]))
    }

    /// An error about a number of `token`.
    pub fn refuse(&self, token: usize, expected: &str, got: impl std::fmt::Display) -> Error {
        Error::Argument(format!("`{}` must {expected}, got {got} for token {token}", self.name))
    }
}

/// to = from
fn widen<T: Copy + Into<f64>>(from: ArrayView1<'_, T>, to: &mut [f64]) {
    assert_eq!(from.len(), to.len());
    match from.as_slice() {
        Some(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to = (*from).into()),
        None => to.iter_mut().zip(from).for_each(|(to, from)| *to = (*from).into()),
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array3;

    use super::*;

    #[test]
    fn any_strides_are_read_in_place() {
        let array = Array3::from_shape_fn((2, 3, 4), |(n, l, i)| (100 * n + 10 * l + i) as f32);
        let mut permuted = array.view().permuted_axes([2, 0, 1]); // [column, token, row]
        permuted.invert_axis(Axis(0));
        let view = View::new("array", Elements::F32(permuted));
        assert_eq!(view.shape(), [4, 2, 3]);
        let (mut row, mut column) = ([0.0; 3], [0.0; 2]);
        view.load_row(1, 1, &mut row).unwrap();
        view.load_column(3, 2, &mut column).unwrap();
        assert_eq!((row, column), ([102.0, 112.0, 122.0], [20.0, 120.0]));
    }

    #[test]
    fn refusals_name_the_argument_and_the_token() {
        let view = View::of_slice("gates", [2, 1, 1], &[0.0, f64::NAN]).unwrap();
        let refusal = view.load_row(1, 0, &mut [0.0]).unwrap_err().to_string();
        assert_eq!(refusal, "`gates` must be finite, got NaN for token 1");
        let refusal = view.require_shape([2, 3, 1]).unwrap_err().to_string();
        assert_eq!(refusal, "`gates` must have shape (2, 3, 1), got (2, 1, 1)");
        assert!(View::of_slice("gates", [2, 1, 1], &[0.0]).is_err());
    }
}
