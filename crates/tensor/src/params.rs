//! Parameter sets: named tensors seen as one flat vector.
//!
//! [`ParamSet`] names the point, [`ParamVec`] a direction at it (a gradient, a perturbation). Norms and inner
//! products are in f64 over all tensors together. [`ParamSet::guard`] makes the parameters safe to change:
//! the guard copies them back, bit for bit, when it goes out of scope, also on an error or a panic.

use crate::{Error, Result, Seed, autograd, fused};
use std::collections::{BTreeMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};
use tch::{Kind, Tensor, no_grad};

/// Addresses of the parameters that an open [`RestoreGuard`] protects, in the whole process.
static PERTURBED: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Mutex::default);

fn address(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}

/// Named tensors (any shapes and kinds) that together are one flat vector of [`numel`](Self::numel) scalars.
#[derive(Debug)]
pub struct ParamSet {
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

impl ParamSet {
    /// Builds the set from names and tensor handles (shallow: the set shares memory with the model).
    ///
    /// # Errors
    /// [`Error::EmptyParamSet`] without tensors, [`Error::DuplicateParam`] when a name or a tensor comes
    /// twice, [`Error::OverlappingParams`] when two tensors share memory.
    pub fn new(params: impl IntoIterator<Item = (String, Tensor)>) -> Result<Self> {
        let (names, tensors): (Vec<_>, Vec<_>) = params.into_iter().unzip();
        if tensors.is_empty() {
            return Err(Error::EmptyParamSet);
        }
        let mut seen = HashSet::new();
        for name in &names {
            if !seen.insert(name) {
                return Err(Error::DuplicateParam { name: name.clone(), other: name.clone() });
            }
        }
        check_disjoint(&names, &tensors)?;
        Ok(Self { names, tensors })
    }

    /// The trainable variables of a variable store, ordered by name.
    ///
    /// # Errors
    /// As [`ParamSet::new`]; a store in which nothing is trainable is [`Error::EmptyParamSet`].
    pub fn from_var_store(store: &tch::nn::VarStore) -> Result<Self> {
        let ordered: BTreeMap<String, Tensor> = store.variables().into_iter().collect();
        Self::new(ordered.into_iter().filter(|(_, tensor)| tensor.requires_grad()))
    }

    /// The names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Names and tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// False: a set has at least one tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Number of scalars.
    pub fn numel(&self) -> usize {
        self.tensors.iter().map(Tensor::numel).sum()
    }

    /// The parameters' values now, as a vector that doesn't share memory with them.
    pub fn snapshot(&self) -> ParamVec {
        no_grad(|| ParamVec { parts: self.tensors.iter().map(|t| Some(t.detach().copy())).collect() })
    }

    /// Euclidean norm of all parameters together.
    pub fn norm(&self) -> f64 {
        self.as_vec().norm()
    }

    /// Adds `alpha · direction` to the parameters in place; parts that are `None` are left alone.
    ///
    /// # Errors
    /// [`Error::Shape`] when the direction doesn't fit.
    pub fn axpy(&self, alpha: f64, direction: &ParamVec) -> Result<()> {
        self.check(direction)?;
        self.as_vec().axpy(alpha, direction)
    }

    /// Adds `alpha_i · direction_i` to parameter `i` in place, for every `i` that the direction has.
    ///
    /// # Errors
    /// [`Error::Shape`] when the direction doesn't fit, [`Error::InvalidArgument`] for another number of factors.
    pub fn axpy_each(&self, alphas: &[f64], direction: &ParamVec) -> Result<()> {
        self.check_factors(alphas, direction)?;
        let moved: Vec<usize> = (0..self.len()).filter(|&i| direction.parts[i].is_some()).collect();
        let tensors: Vec<&Tensor> = moved.iter().map(|&i| &self.tensors[i]).collect();
        let alphas32: Vec<f32> = moved.iter().map(|&i| alphas[i] as f32).collect();
        let parts = direction.present();
        if fused::update([&tensors], [&parts], |i, [w], [d]| *w += alphas32[i] * d) {
            return Ok(());
        }
        add_scaled(&self.tensors, &direction.parts, alphas)
    }

    /// Overwrites the parameters in place; parts that are `None` are left alone.
    ///
    /// # Errors
    /// [`Error::Shape`] when the values don't fit.
    pub fn assign(&self, values: &ParamVec) -> Result<()> {
        self.check(values)?;
        no_grad(|| {
            for (tensor, value) in self.tensors.iter().zip(&values.parts) {
                if let Some(value) = value {
                    tensor.shallow_clone().f_copy_(value)?;
                }
            }
            Ok(())
        })
    }

    /// Gradient of the scalar `loss` with respect to every parameter; `None` for those it doesn't depend on.
    ///
    /// # Errors
    /// [`Error::Detached`] when `loss` has no graph; [`Error::Shape`] when it isn't a scalar.
    pub fn gradient(&self, loss: &Tensor) -> Result<ParamVec> {
        autograd::gradient(loss, self)
    }

    /// As [`gradient`](Self::gradient), keeping the graph for another backward pass.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    pub fn gradient_keeping_graph(&self, loss: &Tensor) -> Result<ParamVec> {
        autograd::gradient_keeping_graph(loss, self)
    }

    /// Copies the parameters, and restores them when the returned guard is dropped.
    ///
    /// # Errors
    /// [`Error::NestedPerturbation`] when one of the parameters is under another open guard.
    pub fn guard(&self) -> Result<RestoreGuard> {
        self.guard_in(None)
    }

    /// As [`guard`](Self::guard), with the memory of an earlier guard for the copies where it fits.
    ///
    /// # Errors
    /// As [`guard`](Self::guard).
    pub fn guard_in(&self, scratch: Option<Scratch>) -> Result<RestoreGuard> {
        let mut guard = RestoreGuard::open(self, scratch)?;
        guard.fill()?;
        Ok(guard)
    }

    /// Adds `alpha_i · direction_i` to parameter `i` under a guard: copy and addition in one pass.
    ///
    /// # Errors
    /// [`Error::Shape`] when the direction doesn't fit, [`Error::NestedPerturbation`] as [`guard`](Self::guard).
    pub fn perturb(&self, alphas: &[f64], direction: &ParamVec, scratch: Option<Scratch>) -> Result<RestoreGuard> {
        self.check_factors(alphas, direction)?;
        let mut guard = RestoreGuard::open(self, scratch)?;
        if !guard.copy_and_add_fused(alphas, direction) {
            guard.copy_and_add_plain(alphas, direction)?;
        }
        Ok(guard)
    }

    /// Adds `alpha` times standard normal numbers, those of [`normal`](Self::normal) with this seed, under a guard.
    /// The numbers are made in the memory of the guard's copies, so no third vector is needed.
    ///
    /// # Errors
    /// [`Error::NestedPerturbation`] as [`guard`](Self::guard); what libtorch reports.
    pub fn perturb_normal(&self, alpha: f64, seed: Seed, scratch: Option<Scratch>) -> Result<RestoreGuard> {
        let mut guard = RestoreGuard::open(self, scratch)?;
        for (i, copy) in guard.copies.iter().enumerate() {
            fused::fill_normal(copy, seed, i as u64)?;
        }
        let tensors: Vec<&Tensor> = self.tensors.iter().collect();
        let copies: Vec<&Tensor> = guard.copies.iter().collect();
        let alpha32 = alpha as f32;
        // The noise gives its place to the copy in the pass that adds it.
        let done = fused::update([&tensors, &copies], [], |_, [w, copy], []| {
            let noise = *copy;
            *copy = *w;
            *w += alpha32 * noise;
        });
        if done {
            guard.filled = guard.copies.len();
        } else {
            let noise: Vec<Option<Tensor>> = no_grad(|| copies.iter().map(|c| Some(c.copy())).collect());
            guard.fill()?;
            add_scaled(&self.tensors, &noise, &vec![alpha; self.len()])?;
        }
        Ok(guard)
    }

    fn check_factors(&self, alphas: &[f64], direction: &ParamVec) -> Result<()> {
        self.check(direction)?;
        if alphas.len() == self.len() {
            return Ok(());
        }
        Err(Error::invalid("alphas", format!("{} factors, one a parameter", self.len()), alphas.len()))
    }

    /// A vector of the shapes of this set, all zeros.
    pub fn zeros(&self) -> ParamVec {
        no_grad(|| ParamVec { parts: self.tensors.iter().map(|t| Some(t.detach().zeros_like())).collect() })
    }

    /// Standard normal numbers of the shapes of this set, tensor `i` from the stream `i` of the seed
    /// ([`fused::fill_normal`]).
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn normal(&self, seed: Seed) -> Result<ParamVec> {
        let noise = self.zeros();
        for (i, part) in noise.present().into_iter().enumerate() {
            fused::fill_normal(part, seed, i as u64)?;
        }
        Ok(noise)
    }

    /// Splits a flat vector (`[numel]`) into the shapes of this set.
    ///
    /// # Errors
    /// [`Error::Shape`] when the length differs.
    pub fn unflatten(&self, flat: &Tensor) -> Result<ParamVec> {
        let expected = vec![self.numel() as i64];
        if flat.size() != expected {
            return Err(Error::Shape { what: "The flat vector".into(), expected, got: flat.size() });
        }
        let mut start = 0;
        let mut parts = Vec::with_capacity(self.len());
        for tensor in &self.tensors {
            let length = tensor.numel() as i64;
            parts.push(Some(flat.f_narrow(0, start, length)?.f_reshape(tensor.size())?));
            start += length;
        }
        Ok(ParamVec { parts })
    }

    /// A vector that shares memory with the parameters.
    fn as_vec(&self) -> ParamVec {
        ParamVec { parts: self.tensors.iter().map(|t| Some(t.detach())).collect() }
    }

    /// Checks that a direction has one part a parameter, each of the parameter's shape where it is there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the number of parts, [`Error::Shape`] naming the first parameter that
    /// doesn't fit.
    pub fn check(&self, vector: &ParamVec) -> Result<()> {
        if vector.parts.len() != self.len() {
            return Err(Error::invalid(
                "the direction",
                format!("{} parts, one a parameter", self.len()),
                vector.parts.len(),
            ));
        }
        for ((name, tensor), part) in self.iter().zip(&vector.parts) {
            if let Some(part) = part
                && part.size() != tensor.size()
            {
                return Err(Error::Shape {
                    what: format!("The part for the parameter \"{name}\""),
                    expected: tensor.size(),
                    got: part.size(),
                });
            }
        }
        Ok(())
    }
}

/// Refuses one tensor under two names, and tensors that are views into each other.
fn check_disjoint(names: &[String], tensors: &[Tensor]) -> Result<()> {
    let mut spans: Vec<(usize, usize, usize)> = tensors
        .iter()
        .enumerate()
        .filter(|(_, t)| t.numel() > 0)
        .map(|(i, t)| {
            // Bytes from the first to the last element, also for a strided view.
            let extent: i64 =
                t.size().iter().zip(t.stride()).map(|(&size, stride)| (size - 1) * stride).sum::<i64>() + 1;
            let start = address(t);
            (start, start + extent as usize * t.kind().elt_size_in_bytes(), i)
        })
        .collect();
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let ((start, end, i), (next, next_end, j)) = (pair[0], pair[1]);
        let (first, second) = (i.min(j), i.max(j));
        if start == next && end == next_end {
            return Err(Error::DuplicateParam { name: names[second].clone(), other: names[first].clone() });
        }
        if next < end {
            return Err(Error::OverlappingParams { name: names[first].clone(), other: names[second].clone() });
        }
    }
    Ok(())
}

/// A direction in the space of a [`ParamSet`]: one tensor a parameter, `None` where there is no gradient.
#[derive(Debug)]
pub struct ParamVec {
    pub(crate) parts: Vec<Option<Tensor>>,
}

impl ParamVec {
    /// A direction from its parts; `None` counts as zeros in sums and leaves a parameter alone in updates.
    pub fn new(parts: Vec<Option<Tensor>>) -> Self {
        Self { parts }
    }

    /// The parts, in the order of the parameter set.
    pub fn parts(&self) -> &[Option<Tensor>] {
        &self.parts
    }

    /// The parts that are there.
    pub fn present(&self) -> Vec<&Tensor> {
        self.parts.iter().flatten().collect()
    }

    /// True when no part is there.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(Option::is_none)
    }

    /// A copy that doesn't share memory.
    #[must_use]
    pub fn copy(&self) -> Self {
        no_grad(|| Self { parts: self.parts.iter().map(|p| p.as_ref().map(Tensor::copy)).collect() })
    }

    /// Euclidean norm, accumulated in f64.
    pub fn norm(&self) -> f64 {
        let present = self.present();
        fused::reduce([&present], |_, [x]| [f64::from(x) * f64::from(x)])
            .map_or_else(|| plain_dot(&present, &present), |[sum]| sum)
            .sqrt()
    }

    /// Inner product, accumulated in f64, over the parts that both have.
    ///
    /// # Errors
    /// [`Error::Shape`] when a part's shape differs, [`Error::InvalidArgument`] when the number of parts does.
    pub fn dot(&self, other: &Self) -> Result<f64> {
        let (a, b) = self.common(other)?;
        let sum = fused::reduce([&a, &b], |_, [x, y]| [f64::from(x) * f64::from(y)]);
        Ok(sum.map_or_else(|| plain_dot(&a, &b), |[sum]| sum))
    }

    /// `self ← self + alpha · other` in place, over the parts that both have.
    ///
    /// # Errors
    /// As [`dot`](Self::dot).
    pub fn axpy(&self, alpha: f64, other: &Self) -> Result<()> {
        let (y, x) = self.common(other)?;
        let alpha32 = alpha as f32;
        if fused::update([&y], [&x], |_, [y], [x]| *y += alpha32 * x) {
            return Ok(());
        }
        no_grad(|| {
            for (y, x) in y.iter().zip(&x) {
                let sum = y.f_add(&x.f_mul_scalar(alpha)?)?;
                y.shallow_clone().f_copy_(&sum)?;
            }
            Ok(())
        })
    }

    /// Adds another direction in place; a part that only the other one has is taken over.
    ///
    /// # Errors
    /// As [`axpy`](Self::axpy).
    pub fn accumulate(&mut self, other: Self) -> Result<()> {
        self.axpy(1.0, &other)?;
        for (own, part) in self.parts.iter_mut().zip(other.parts) {
            if own.is_none() {
                *own = part;
            }
        }
        Ok(())
    }

    /// Multiplies every part by `factor` in place.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn scale(&self, factor: f64) -> Result<()> {
        let parts = self.present();
        let factor32 = factor as f32;
        if fused::update([&parts], [], |_, [y], []| *y *= factor32) {
            return Ok(());
        }
        no_grad(|| {
            for part in parts {
                let _ = part.shallow_clone().f_mul_scalar_(factor)?;
            }
            Ok(())
        })
    }

    /// One flat tensor `[numel]`; parts that are `None` are zeros of the parameter's shape.
    ///
    /// # Errors
    /// [`Error::Shape`] when the vector doesn't fit `params`.
    pub fn flatten(&self, params: &ParamSet) -> Result<Tensor> {
        params.check(self)?;
        let parts: Vec<Tensor> = self
            .parts
            .iter()
            .zip(&params.tensors)
            .map(|(part, tensor)| match part {
                Some(part) => part.reshape([-1]),
                None => tensor.detach().zeros_like().reshape([-1]),
            })
            .collect();
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// The parts that both have, of equal shapes.
    fn common<'a>(&'a self, other: &'a Self) -> Result<(Vec<&'a Tensor>, Vec<&'a Tensor>)> {
        if self.parts.len() != other.parts.len() {
            let expected = format!("as many parts as the other one ({})", self.parts.len());
            return Err(Error::invalid("a direction", expected, other.parts.len()));
        }
        let (mut mine, mut theirs) = (Vec::new(), Vec::new());
        for (i, (a, b)) in self.parts.iter().zip(&other.parts).enumerate() {
            if let (Some(a), Some(b)) = (a, b) {
                if a.size() != b.size() {
                    return Err(Error::Shape { what: format!("Part {i}"), expected: a.size(), got: b.size() });
                }
                mine.push(a);
                theirs.push(b);
            }
        }
        Ok((mine, theirs))
    }
}

/// Adds `alpha · part` to each tensor by libtorch operations, for every device and kind.
fn add_scaled(tensors: &[Tensor], parts: &[Option<Tensor>], alphas: &[f64]) -> Result<()> {
    no_grad(|| {
        for ((tensor, part), &alpha) in tensors.iter().zip(parts).zip(alphas) {
            if let Some(part) = part {
                // Half kinds round once: the sum is formed in f32.
                let wide = if matches!(tensor.kind(), Kind::Double) { Kind::Double } else { Kind::Float };
                let moved = tensor.to_kind(wide).f_add(&part.to_kind(wide).f_mul_scalar(alpha)?)?;
                tensor.shallow_clone().f_copy_(&moved)?;
            }
        }
        Ok(())
    })
}

/// The inner product by libtorch operations, in f64; for every device and kind.
fn plain_dot(a: &[&Tensor], b: &[&Tensor]) -> f64 {
    no_grad(|| {
        a.iter()
            .zip(b)
            .map(|(a, b)| (a.to_kind(Kind::Double) * b.to_kind(Kind::Double)).sum(Kind::Double).double_value(&[]))
            .sum()
    })
}

/// Memory of a closed guard, kept for the next one.
#[derive(Debug)]
pub struct Scratch {
    copies: Vec<Tensor>,
}

impl Scratch {
    fn fits(&self, params: &ParamSet) -> bool {
        self.copies.len() == params.len()
            && self.copies.iter().zip(&params.tensors).all(|(copy, tensor)| {
                copy.size() == tensor.size() && copy.kind() == tensor.kind() && copy.device() == tensor.device()
            })
    }
}

/// Keeps a copy of parameters and puts it back, bit for bit, when dropped.
///
/// While a guard is open its parameters count as perturbed ([`is_perturbed`]), and a second guard over any
/// of them is refused (a parameter is known by the address of its memory).
#[derive(Debug)]
pub struct RestoreGuard {
    tensors: Vec<Tensor>,
    /// Where the tensors lay when the guard was opened: what the registry holds.
    addresses: Vec<usize>,
    copies: Vec<Tensor>,
    /// How many copies are made; only those may be put back.
    filled: usize,
}

impl RestoreGuard {
    /// Marks the parameters as perturbed and provides memory for the copies (not yet filled).
    fn open(params: &ParamSet, scratch: Option<Scratch>) -> Result<Self> {
        let mut perturbed = PERTURBED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((name, _)) = params.iter().find(|(_, t)| perturbed.contains(&address(t))) {
            return Err(Error::NestedPerturbation { name: name.to_owned() });
        }
        let copies = match scratch.filter(|scratch| scratch.fits(params)) {
            Some(scratch) => scratch.copies,
            None => no_grad(|| params.tensors.iter().map(|t| t.detach().empty_like()).collect()),
        };
        let addresses: Vec<usize> = params.tensors.iter().map(address).filter(|&a| a != 0).collect();
        perturbed.extend(&addresses);
        let tensors = params.tensors.iter().map(Tensor::shallow_clone).collect();
        Ok(Self { tensors, addresses, copies, filled: 0 })
    }

    fn fill(&mut self) -> Result<()> {
        no_grad(|| {
            for (copy, tensor) in self.copies.iter().zip(&self.tensors) {
                copy.shallow_clone().f_copy_(tensor)?;
                self.filled += 1;
            }
            Ok(())
        })
    }

    fn copy_and_add_fused(&mut self, alphas: &[f64], direction: &ParamVec) -> bool {
        // Every parameter is copied; those without a direction are not moved. The fused loop wants lists of
        // equal length, so it only takes the case that every part is there.
        let parts = direction.present();
        if parts.len() != self.tensors.len() {
            return false;
        }
        let tensors: Vec<&Tensor> = self.tensors.iter().collect();
        let copies: Vec<&Tensor> = self.copies.iter().collect();
        let alphas: Vec<f32> = alphas.iter().map(|&a| a as f32).collect();
        let done = fused::update([&tensors, &copies], [&parts], |i, [w, copy], [d]| {
            *copy = *w;
            *w += alphas[i] * d;
        });
        if done {
            self.filled = self.copies.len();
        }
        done
    }

    fn copy_and_add_plain(&mut self, alphas: &[f64], direction: &ParamVec) -> Result<()> {
        self.fill()?;
        add_scaled(&self.tensors, &direction.parts, alphas)
    }

    /// Moves the parameters to `original_i + alpha_i · direction_i`, wherever they are now; a parameter whose part is
    /// `None` is put back to its original.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the numbers of factors, parts and parameters differ; a part of another shape is
    /// what libtorch reports.
    pub fn shift(&self, alphas: &[f64], direction: &ParamVec) -> Result<()> {
        if alphas.len() != self.tensors.len() || direction.parts.len() != self.tensors.len() {
            let got = format!("{} factors and {} parts", alphas.len(), direction.parts.len());
            return Err(Error::invalid("the direction", format!("{} of each", self.tensors.len()), got));
        }
        let (mut tensors, mut copies, mut parts, mut factors) = (vec![], vec![], vec![], vec![]);
        for (i, part) in direction.parts.iter().enumerate() {
            let (tensor, copy) = (&self.tensors[i], &self.copies[i]);
            match part {
                Some(part) => {
                    tensors.push(tensor);
                    copies.push(copy);
                    parts.push(part);
                    factors.push(alphas[i]);
                }
                None => no_grad(|| tensor.shallow_clone().f_copy_(copy))?,
            }
        }
        let narrow: Vec<f32> = factors.iter().map(|&a| a as f32).collect();
        if !fused::update([&tensors], [&copies, &parts], |i, [w], [copy, d]| *w = copy + narrow[i] * d) {
            self.put_back()?;
            add_scaled(&self.tensors, &direction.parts, alphas)?;
        }
        Ok(())
    }

    /// Copies the originals back, with the guard staying open.
    fn put_back(&self) -> Result<()> {
        no_grad(|| {
            for (tensor, copy) in self.tensors.iter().zip(&self.copies) {
                tensor.shallow_clone().f_copy_(copy)?;
            }
            Ok(())
        })
    }

    /// The copies: the parameters as they were when the guard was opened, in the set's order.
    pub fn originals(&self) -> &[Tensor] {
        &self.copies
    }

    /// Restores the parameters now and returns the memory of the copies.
    pub fn close(mut self) -> Scratch {
        self.restore();
        Scratch { copies: std::mem::take(&mut self.copies) }
    }

    /// Keeps the parameters as they are now and returns the memory of the copies.
    pub fn keep(mut self) -> Scratch {
        self.release();
        Scratch { copies: std::mem::take(&mut self.copies) }
    }

    fn release(&self) {
        let mut perturbed = PERTURBED.lock().unwrap_or_else(PoisonError::into_inner);
        for address in &self.addresses {
            perturbed.remove(address);
        }
    }

    fn restore(&self) {
        let tensors: Vec<&Tensor> = self.tensors.iter().take(self.filled).collect();
        let copies: Vec<&Tensor> = self.copies.iter().take(self.filled).collect();
        if !fused::update([&tensors], [&copies], |_, [w], [copy]| *w = copy) {
            no_grad(|| {
                for (tensor, copy) in tensors.iter().zip(&copies) {
                    // Shapes and kinds agree by construction; drop can't report, and must not panic twice.
                    let _ = tensor.shallow_clone().f_copy_(copy);
                }
            });
        }
        self.release();
    }
}

impl Drop for RestoreGuard {
    fn drop(&mut self) {
        if !self.copies.is_empty() {
            self.restore();
        }
    }
}

/// True when an open [`RestoreGuard`] protects the tensor: its values are not the model's own.
pub fn is_perturbed(tensor: &Tensor) -> bool {
    PERTURBED.lock().unwrap_or_else(PoisonError::into_inner).contains(&address(tensor))
}
