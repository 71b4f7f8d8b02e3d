//! The delta rule over time on the CPU, S ← a S, S ← S + k (β (vᵀ − kᵀS)), y = Sᵀq, forward and backward.
//!
//! The recurrence itself is the fastest algorithm here. A state (K, V) is cut into slices of columns, which do not depend
//! on each other and stay in the first-level cache. Two steps of the forward, or one of the backward, are a single pass over
//! one: `slice` has those of the forward, `transposed` those of the backward, `rows` loads what they take, and `loaded` keeps
//! it for the forward's next steps. [`forward`] leaves the state before every chunk of
//! tokens; where there is a single step, `single` does it without slices. [`backward`] goes through the chunks from the last
//! to the first: `walk` rebuilds the states of one and walks back through them, for a slice, and `sums` adds up what slices
//! and states share.

pub mod backward;
mod chunk;
mod division;
pub mod forward;
mod loaded;
mod partial;
mod rows;
mod single;
mod slice;
mod sums;
#[cfg(test)]
mod tests;
mod transposed;
mod walk;

pub use division::{CHUNK_STEPS, chunks};
