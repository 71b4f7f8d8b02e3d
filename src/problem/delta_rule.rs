//! `delta_rule`: a state (K, V) for each of H heads, which every token decays, rewrites n times and queries.

use super::sizes::{check_documents, expect_addressable, positive, stored_beside};
use crate::error::{Error, Result, shape_text};
use crate::tensor::{Dtype, Tensor};

/// Sizes of a delta rule over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverTime {
    pub batch: usize,
    pub time: usize,
    /// n, rewrites of a state per token
    pub steps: usize,
    /// H
    pub states: usize,
    /// heads of q, k and v
    pub queries: usize,
    pub keys: usize,
    pub values: usize,
    /// K and V, features of a key and of a value
    pub key: usize,
    pub value: usize,
}

impl OverTime {
    /// Returns how many queries there are to one state.
    pub fn queries_of_a_state(&self) -> usize {
        (self.queries / self.states).max(1)
    }

    /// Returns the heads of y.
    pub fn outputs(&self) -> usize {
        self.states * self.queries_of_a_state()
    }
}

/// The delta rule over time: S ← exp(g) S, n times S ← S + k (β (vᵀ − kᵀS)), y = scale · Sᵀq.
#[derive(Debug)]
pub struct DeltaRule {
    pub sizes: OverTime,
    /// (B, T, ·, K)
    pub q: Tensor,
    /// (B, T, ·, K) or (B, T, n, ·, K)
    pub k: Tensor,
    /// (B, T, ·, V) or (B, T, n, ·, V)
    pub v: Tensor,
    /// (B, T, H) or (B, T, n, H)
    pub beta: Tensor,
    /// (B, T, H), or (B, T, H, K) for a decay of each key feature; None for no decay
    pub g: Option<Tensor>,
    pub scale: f64,
    /// (B, H, K, V); None for zeros
    pub initial_state: Option<Tensor>,
    /// the tokens (B, T) at which the state begins again from zeros
    pub document_starts: Option<Tensor>,
}

/// The tensors that a delta rule takes, not yet checked.
pub struct Given {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub beta: Tensor,
    pub g: Option<Tensor>,
    pub scale: Option<f64>,
    pub initial_state: Option<Tensor>,
    pub document_starts: Option<Tensor>,
}

/// The outputs of a forward that its backward needs, and the gradients of the others.
pub struct SavedOverTime {
    /// v − kᵀS of every step, as v with H heads
    pub errors: Tensor,
    /// (B, H, chunks, K, V): the state before every chunk of tokens
    pub states: Tensor,
    pub grad_y: Option<Tensor>,
    pub grad_final_state: Option<Tensor>,
}

impl DeltaRule {
    pub fn new(given: Given) -> Result<DeltaRule> {
        let Given { q, k, v, beta, g, scale, initial_state, document_starts } = given;
        let sizes = sizes_of(&q, &k, &v, &beta)?;
        let stored = stored_beside(q.dtype);
        for tensor in [&k, &v] {
            tensor.expect_beside(&q)?;
            tensor.expect_dtype(stored)?;
        }
        let OverTime { batch, time, states, key, value, .. } = sizes;
        if let Some(g) = &g
            && g.shape != [batch, time, states]
            && g.shape != [batch, time, states, key]
        {
            let [one, each] = [&[batch, time, states][..], &[batch, time, states, key]].map(shape_text);
            let expected = format!("{one} or {each}");
            return Err(Error::Shape { name: "g", expected, got: shape_text(&g.shape) });
        }
        if let Some(state) = &initial_state {
            state.expect_shape(&[batch, states, key, value])?;
        }
        for tensor in [Some(&beta), g.as_ref(), initial_state.as_ref()].into_iter().flatten() {
            tensor.expect_beside(&q)?;
            tensor.expect_dtype(&[accumulated(q.dtype)])?;
        }
        if let Some(scale) = scale {
            positive("scale", scale)?;
        }
        if let Some(starts) = &document_starts {
            check_documents(starts, &[batch, time], &q, true, "")?;
        }
        let scale = scale.unwrap_or_else(|| (key as f64).powf(-0.5));
        Ok(DeltaRule { sizes, q, k, v, beta, g, scale, initial_state, document_starts })
    }

    /// Returns the dtype of states, gates and sums.
    pub fn small(&self) -> Dtype {
        accumulated(self.q.dtype)
    }

    pub fn y_shape(&self) -> [usize; 4] {
        let OverTime { batch, time, value, .. } = self.sizes;
        [batch, time, self.sizes.outputs(), value]
    }

    pub fn state_shape(&self) -> [usize; 4] {
        let OverTime { batch, states, key, value, .. } = self.sizes;
        [batch, states, key, value]
    }

    /// Returns the shape of v with the heads of the states.
    pub fn errors_shape(&self) -> Vec<usize> {
        let mut shape = self.v.shape.clone();
        let heads = shape.len() - 2;
        shape[heads] = self.sizes.states;
        shape
    }

    /// Returns the shape of the states that are saved, one before each of so many chunks.
    pub fn states_shape(&self, chunks: usize) -> [usize; 5] {
        let OverTime { batch, states, key, value, .. } = self.sizes;
        [batch, states, chunks, key, value]
    }

    /// Returns the features of a decay: K, or 1 for one of the whole head.
    pub fn decays(&self) -> usize {
        self.g.as_ref().map_or(1, |g| if g.shape.len() == 4 { self.sizes.key } else { 1 })
    }

    /// Fails unless these are what the forward saved with so many chunks, and gradients of its outputs.
    pub fn check_saved(&self, saved: &SavedOverTime, chunks: usize) -> Result<()> {
        let stored = [self.v.dtype];
        let small = [self.small()];
        let check = |tensor: &Tensor, shape: &[usize], dtype: &[Dtype]| {
            tensor.expect_shape(shape)?;
            tensor.expect_beside(&self.q)?;
            tensor.expect_dtype(dtype)
        };
        check(&saved.errors, &self.errors_shape(), &small)?;
        check(&saved.states, &self.states_shape(chunks), &small)?;
        if let Some(grad) = &saved.grad_y {
            check(grad, &self.y_shape(), &stored)?;
        }
        saved.grad_final_state.as_ref().map_or(Ok(()), |grad| check(grad, &self.state_shape(), &small))
    }
}

/// float64 for float64, else float32.
fn accumulated(dtype: Dtype) -> Dtype {
    if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 }
}

const QUERIES: &str = "(batch, time, heads, key_features), the latter two from 1 on";

/// Returns the sizes; fails if the shapes do not belong together.
fn sizes_of(q: &Tensor, k: &Tensor, v: &Tensor, beta: &Tensor) -> Result<OverTime> {
    fn wrong<T>(tensor: &Tensor, expected: String) -> Result<T> {
        Err(Error::Shape { name: tensor.name, expected, got: shape_text(&tensor.shape) })
    }
    let &[batch, time, queries, key] = q.shape.as_slice() else {
        return wrong(q, QUERIES.into());
    };
    if queries == 0 || key == 0 {
        return wrong(q, QUERIES.into());
    }
    q.expect_dtype(&Dtype::NUMBERS)?;
    let (steps, states) = match *beta.shape.as_slice() {
        [b, t, states] if [b, t] == [batch, time] && states > 0 => (None, states),
        [b, t, steps, states] if [b, t] == [batch, time] && states > 0 && steps > 0 => (Some(steps), states),
        _ => {
            return wrong(
                beta,
                format!("({batch}, {time}, H) or ({batch}, {time}, n, H), n and H from 1 on"),
            );
        }
    };
    let axis = steps.map_or(String::new(), |steps| format!("{steps}, "));
    if !states.is_multiple_of(queries) && !queries.is_multiple_of(states) {
        let expected =
            format!("({batch}, {time}, h, {key}) with h that divides {states} or a multiple of it");
        return wrong(q, expected);
    }
    let heads = |tensor: &Tensor, features: Option<usize>| {
        let name = features.map_or("V".into(), |features| features.to_string());
        let wide = if features.is_none() { " and V from 1 on" } else { "" };
        let expected = format!("({batch}, {time}, {axis}h, {name}) with h that divides {states}{wide}");
        let Some((&[heads, last], first)) = tensor.shape.split_last_chunk::<2>().map(|(a, b)| (b, a)) else {
            return wrong(tensor, expected);
        };
        let batch = [Some(batch), Some(time), steps].into_iter().flatten();
        let fits = heads > 0 && states.is_multiple_of(heads) && first.iter().copied().eq(batch);
        match fits && last > 0 && features.is_none_or(|features| features == last) {
            true => Ok((heads, last)),
            false => wrong(tensor, expected),
        }
    };
    let ((keys, _), (values, value)) = (heads(k, Some(key))?, heads(v, None)?);
    expect_addressable("v", &[batch, states.max(queries), time.max(1), key, value])?;
    Ok(OverTime { batch, time, steps: steps.unwrap_or(1), states, queries, keys, values, key, value })
}
