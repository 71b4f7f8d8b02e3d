//! Arithmetic on a state's rows (d, m) as they are stored, feature by feature, each with its m channels.
//!
//! [`StateRows`] is what the operators need. `vectors` has it for m = 1, 2, 4, 8 and 16 in float32 arithmetic, `portable`
//! for the rest: other m, float64, and the features that do not fill a vector. A row of one number per feature has the
//! accumulation type A, in the features' order, and so do weights of the state's shape.

mod portable;
mod rows;
mod stored;
mod vectors;

#[cfg(test)]
mod tests;

pub use rows::{Finish, Join, Mix, StateRows, Stored, Terms};
