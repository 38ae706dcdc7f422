//! One walk through the decoder: what it takes, what it knows of its tokens, and how it ends early.

use crate::cache::Cache;
use crate::config::ModelConfig;
use crate::hooks::{Hooks, Site, TokenInfo};
use crate::lora::AdapterView;
use crate::moe::LayerRouting;
use crate::{Error, Result};
use tensor::tch::{Device, Kind, Tensor};

/// What a pass uses besides its tokens. `Pass::default()` is the plain full pass.
#[derive(Debug, Default)]
pub struct Pass<'a, 'h> {
    /// Keys and values of earlier tokens; this pass's are appended. None: the tokens are the whole text. What is appended
    /// has no gradient, so a pass whose keys or values are recorded by autograd is refused: go without a cache, or under
    /// `no_grad`.
    pub cache: Option<&'a mut Cache>,
    /// Which tokens are real, `[batch, time]` of bool, padding on the left; none if all are.
    pub real: Option<&'a Tensor>,
    /// Hooks on the residual stream.
    pub hooks: Option<&'a mut Hooks<'h>>,
    /// A LoRA adapter over the weights.
    pub adapter: Option<AdapterView<'a>>,
    /// Real prompt tokens of each row, for hooks; by default all real tokens of the cache's first pass, or of this one
    /// without a cache.
    pub prompt_lengths: Option<&'a [i64]>,
    /// Number of each row for hooks ([`TokenInfo::rows`]); by default they count from 0.
    pub rows: Option<&'a [usize]>,
    /// Collects the routing of each mixture-of-experts layer; nothing of a pass that fails.
    pub routings: Option<&'a mut Vec<LayerRouting>>,
    /// Whether routers are asked for their losses; attention kernels are told too.
    pub training: bool,
}

/// What a pass knows of its tokens.
#[derive(Debug)]
pub(crate) struct Tokens {
    /// `[batch or 1, time]` of i64.
    pub positions: Tensor,
    /// `[batch, time]` of bool.
    pub real: Option<Tensor>,
    /// `[batch, past + time]` of bool.
    pub all_real: Option<Tensor>,
    pub prompt_lengths: Vec<i64>,
    pub rows: Vec<usize>,
    /// Position of the token after this pass, by row.
    pub next: Vec<i64>,
    pub past: i64,
    pub step: usize,
    pub batch: i64,
    pub time: i64,
}

impl Tokens {
    /// Checks mask, cache and context for tokens (or activations) of `batch` rows and `time` columns on `device`, where
    /// everything is put that goes with them.
    pub(crate) fn new(
        pass: &Pass<'_, '_>,
        [batch, time]: [i64; 2],
        device: Device,
        config: &ModelConfig,
    ) -> Result<Self> {
        let cache = pass.cache.as_deref();
        let past = cache.map_or(0, Cache::len);
        if time == 0 || batch == 0 {
            return Err(Error::EmptyPrompt { row: 0 });
        }
        if past > 0 && cache.is_some_and(|c| c.next.len() as i64 != batch) {
            let expected = format!("{} rows, as the cache has", cache.map_or(0, |c| c.next.len()));
            return Err(Error::invalid("ids", expected, format!("{batch} rows")));
        }
        let starts = |row: usize| cache.and_then(|c| c.next.get(row)).copied().unwrap_or(0);
        // A mask without padding says nothing; without it the fast paths are open.
        let real = match pass.real {
            None => None,
            Some(real) => {
                check_mask(real, batch, time, past)?;
                if bool::try_from(real.f_all()?)? { None } else { Some(real.f_to_device(device)?) }
            }
        };
        let lengths: Vec<i64> = match &real {
            None => vec![time; batch as usize],
            Some(real) => Vec::try_from(real.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Int64)?)?,
        };
        let next: Vec<i64> = lengths.iter().enumerate().map(|(row, n)| starts(row) + n).collect();
        let (longest, max) = (next.iter().copied().max().unwrap_or(0), config.positions());
        if longest > max {
            return Err(Error::ContextOverflow { len: longest, max });
        }
        let uniform = real.is_none() && (0..batch as usize).all(|row| starts(row) == starts(0));
        let positions = if uniform {
            Tensor::f_arange_start(starts(0), starts(0) + time, (Kind::Int64, device))?.f_view([1, time])?
        } else {
            let starts: Vec<i64> = (0..batch as usize).map(starts).collect();
            let within = match &real {
                None => Tensor::f_arange(time, (Kind::Int64, device))?.f_view([1, time])?,
                Some(real) => (real.f_cumsum(1, Kind::Int64)? - 1).f_clamp_min(0)?,
            };
            within.f_add(&Tensor::from_slice(&starts).f_to_device(device)?.f_view([batch, 1])?)?
        };
        let all_real = match (cache.and_then(|c| c.real.as_ref()), &real) {
            (None, None) => None,
            (before, now) => {
                let ones = |n| Tensor::f_ones([batch, n], (Kind::Bool, device));
                let before = before.map_or_else(|| ones(past), |b| b.f_to_device(device))?;
                let now = now.as_ref().map_or_else(|| ones(time), |n| Ok(n.shallow_clone()))?;
                Some(Tensor::f_cat(&[before, now], 1)?)
            }
        };
        let prompt_lengths = match (pass.prompt_lengths, cache.filter(|c| !c.is_empty())) {
            (Some(given), _) if given.len() as i64 == batch => given.to_vec(),
            (Some(given), _) => {
                return Err(Error::invalid("prompt_lengths", format!("one for each of {batch} rows"), given.len()));
            }
            (None, Some(cache)) => cache.prompt_lengths.clone(),
            (None, None) => lengths,
        };
        let rows = match pass.rows {
            None => (0..batch as usize).collect(),
            Some(given) if given.len() as i64 == batch => given.to_vec(),
            Some(given) => return Err(Error::invalid("rows", format!("one for each of {batch} rows"), given.len())),
        };
        let step = cache.map_or(0, Cache::steps);
        Ok(Self { positions, real, all_real, prompt_lengths, rows, next, past, step, batch, time })
    }

    /// Positions for every row.
    pub(crate) fn positions_by_row(&self) -> Result<Tensor> {
        Ok(self.positions.f_expand([self.batch, self.time], false)?)
    }

    /// Writes what was read into the cache's bookkeeping, once all layers have been appended.
    pub(crate) fn commit(&self, cache: &mut Cache) -> Result<()> {
        cache.starts.push(cache.len);
        cache.len += self.time;
        cache.real = self.all_real.as_ref().map(Tensor::f_detach).transpose()?;
        cache.next.clone_from(&self.next);
        cache.prompt_lengths.clone_from(&self.prompt_lengths);
        Ok(())
    }
}

fn check_mask(real: &Tensor, batch: i64, time: i64, past: i64) -> Result<()> {
    if real.size() != [batch, time] {
        return Err(Error::shape("The mask of real tokens", format!("[{batch}, {time}]"), real));
    }
    if real.kind() != Kind::Bool {
        return Err(Error::invalid("real", "of the kind Bool, true for real tokens", format!("{:?}", real.kind())));
    }
    let real = real.f_to_kind(Kind::Int64)?;
    let last = Vec::<i64>::try_from(real.f_select(1, time - 1)?)?;
    if let Some(row) = last.iter().position(|&r| r == 0) {
        let empty = real.f_select(0, row as i64)?.f_sum(Kind::Int64)?.f_int64_value(&[])? == 0;
        return Err(if empty {
            Error::EmptyPrompt { row }
        } else {
            Error::invalid("real", "padding on the left only", format!("a mask whose row {row} ends with padding"))
        });
    }
    let rises = real.f_diff(1, 1, None::<&Tensor>, None::<&Tensor>)?.f_min();
    if time > 1 && rises?.f_int64_value(&[])? < 0 {
        return Err(Error::invalid("real", "padding on the left only", "a mask with padding between real tokens"));
    }
    if past > 0 && real.f_min()?.f_int64_value(&[])? == 0 {
        let expected = "all true once the cache has tokens: padding stands before a text, not in it";
        return Err(Error::invalid("real", expected, "a mask with padding"));
    }
    Ok(())
}

/// Why a walk through the layers ended.
#[derive(Debug)]
pub(crate) enum Exit {
    /// A hook's stop was reached; these are the activations there.
    Done(Tensor),
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Exit {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// The hooks of a pass with what they are told.
#[derive(Debug)]
pub(crate) struct Walk<'a, 'h> {
    hooks: Option<&'a mut Hooks<'h>>,
    info: TokenInfo<'a>,
}

impl<'a, 'h> Walk<'a, 'h> {
    pub(crate) fn new(hooks: Option<&'a mut Hooks<'h>>, positions: &'a Tensor, tokens: &'a Tokens) -> Self {
        let info = TokenInfo {
            positions,
            real: tokens.real.as_ref(),
            prompt_lengths: &tokens.prompt_lengths,
            rows: &tokens.rows,
            step: tokens.step,
        };
        Self { hooks, info }
    }

    /// The activations after the hooks of the site; an exit if the pass ends here.
    pub(crate) fn at(&mut self, site: Site, x: Tensor) -> std::result::Result<Tensor, Exit> {
        let Some(hooks) = &mut self.hooks else { return Ok(x) };
        let x = hooks.run(site, x, &self.info)?;
        if hooks.stops_after() == Some(site) { Err(Exit::Done(x)) } else { Ok(x) }
    }
}
