//! The socket for keys and values of past tokens, and the state of a decoding.

use crate::{Error, Result};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use tensor::tch::Tensor;

/// The socket: where keys and values of past tokens live, layer by layer.
///
/// All rows of a batch have the same number of tokens, padding included. A pass appends to each layer once, in order.
pub trait KvStore: fmt::Debug + Send {
    /// Appends keys and values `[batch, kv_heads, time, head_dim]` to a layer and returns all of them,
    /// `[batch, kv_heads, total, head_dim]`. What is returned is read before the next append and not kept. Keys are
    /// turned by their positions already (RoPE). Nothing may be left out: a pass whose store has fewer or more tokens in a
    /// layer than were read is refused, so a store that forgets tokens can't be one.
    ///
    /// # Errors
    /// Whatever the plug reports, for instance that memory is out.
    fn append(&mut self, layer: usize, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)>;

    /// Tokens of a layer.
    fn len(&self, layer: usize) -> i64;

    /// Whether a layer has no tokens.
    fn is_empty(&self, layer: usize) -> bool {
        self.len(layer) == 0
    }

    /// Keeps the first `len` tokens of every layer that has more.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn truncate(&mut self, len: i64) -> Result<()>;

    /// Makes row `i` what row `rows[i]` was (i64, any length, on any device), for beams and for finished rows.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn select_rows(&mut self, rows: &Tensor) -> Result<()>;

    /// An independent store with the same tokens.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn fork(&self) -> Result<Box<dyn KvStore>>;

    /// Bytes that it takes.
    fn bytes(&self) -> u64;
}

/// The plain default: one tensor a layer for keys and one for values, which grows by half its size.
#[derive(Debug, Default)]
pub struct GrowingKv {
    layers: Vec<Option<Layer>>,
}

#[derive(Debug)]
struct Layer {
    /// `[batch, kv_heads, capacity, head_dim]`.
    key: Tensor,
    value: Tensor,
    len: i64,
}

/// Room that a layer gets at first.
const FIRST_CAPACITY: i64 = 64;

impl GrowingKv {
    /// An empty store for a model of `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| None).collect() }
    }
}

impl Layer {
    fn used(&self) -> Result<(Tensor, Tensor)> {
        Ok((self.key.f_narrow(2, 0, self.len)?, self.value.f_narrow(2, 0, self.len)?))
    }

    fn with_room(old: Option<&Self>, like: &Tensor, need: i64) -> Result<Self> {
        let size = like.size();
        let capacity = old.map_or(FIRST_CAPACITY, |old| old.len + old.len / 2).max(need);
        let make = || Tensor::f_empty([size[0], size[1], capacity, size[3]], (like.kind(), like.device()));
        let mut new = Self { key: make()?, value: make()?, len: 0 };
        if let Some(old) = old {
            let (key, value) = old.used()?;
            new.push(&key, &value)?;
        }
        Ok(new)
    }

    fn push(&mut self, key: &Tensor, value: &Tensor) -> Result<()> {
        let time = key.size()[2];
        self.key.f_narrow(2, self.len, time)?.f_copy_(key)?;
        self.value.f_narrow(2, self.len, time)?.f_copy_(value)?;
        self.len += time;
        Ok(())
    }
}

impl KvStore for GrowingKv {
    fn append(&mut self, layer: usize, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        let layers = self.layers.len();
        let slot = self.layers.get_mut(layer).ok_or(Error::LayerOutOfRange { layer, layers })?;
        if let Some(old) = slot.as_ref() {
            let (have, got) = (old.key.size(), key.size());
            if (have[0], have[1], have[3]) != (got[0], got[1], got[3]) {
                let expected = format!("[{}, {}, _, {}], as the cached ones", have[0], have[1], have[3]);
                return Err(Error::shape("The keys for the cache", expected, key));
            }
        }
        // The cache holds values, not graphs: writing in place would break them.
        let _guard = tensor::tch::no_grad_guard();
        let need = slot.as_ref().map_or(0, |l| l.len) + key.size()[2];
        if slot.as_ref().is_none_or(|l| l.key.size()[2] < need) {
            *slot = Some(Layer::with_room(slot.as_ref(), key, need)?);
        }
        let slot = slot.as_mut().ok_or(Error::LayerOutOfRange { layer, layers })?;
        slot.push(key, value)?;
        slot.used()
    }

    fn len(&self, layer: usize) -> i64 {
        self.layers.get(layer).and_then(Option::as_ref).map_or(0, |l| l.len)
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        if len <= 0 {
            // An empty store takes batches of any size.
            self.layers.iter_mut().for_each(|layer| *layer = None);
        }
        for layer in self.layers.iter_mut().flatten() {
            layer.len = layer.len.min(len);
        }
        Ok(())
    }

    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        let select = |layer: &Option<Layer>| {
            let Some(Layer { key, value, len }) = layer else { return Ok(None) };
            let rows = rows.f_to_device(key.device())?;
            Ok(Some(Layer { key: key.f_index_select(0, &rows)?, value: value.f_index_select(0, &rows)?, len: *len }))
        };
        // All layers or none: rows of different texts must not meet.
        self.layers = self.layers.iter().map(select).collect::<Result<_>>()?;
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvStore>> {
        let copy = |layer: &Option<Layer>| {
            let Some(layer) = layer else { return Ok(None) };
            let (key, value) = layer.used()?;
            Ok(Some(Layer { key: key.f_alias_copy()?, value: value.f_alias_copy()?, len: layer.len }))
        };
        Ok(Box::new(Self { layers: self.layers.iter().map(copy).collect::<Result<_>>()? }))
    }

    fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flatten();
        layers.map(|l| crate::linear::bytes_of(&l.key) + crate::linear::bytes_of(&l.value)).sum()
    }
}

/// Which cache a pass has, and whether its past was changed: for attention kernels that keep summaries of past keys and
/// extend them token by token. As long as it is the same as in the pass before, tokens were only appended; otherwise the
/// summary must be made again from the keys that are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheId {
    /// A number that no other cache of the process has. A fork has its own.
    pub id: u64,
    /// Grows whenever tokens are taken away or rows are moved: by [`Cache::truncate`], [`Cache::select_rows`] and a pass
    /// that fails.
    pub generation: u64,
}

impl CacheId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), generation: 0 }
    }
}

/// The state of a decoding: what was read so far, in a [`KvStore`], with the padding and lengths of each row.
#[derive(Debug)]
pub struct Cache {
    store: Box<dyn KvStore>,
    id: CacheId,
    /// Tokens of each row so far, padding included.
    pub(crate) len: i64,
    /// Where each pass so far began.
    pub(crate) starts: Vec<i64>,
    /// Which of the `len` tokens are real, `[batch, len]` of bool; none if all are.
    pub(crate) real: Option<Tensor>,
    /// Position of the next token of each row.
    pub(crate) next: Vec<i64>,
    /// Real prompt tokens of each row.
    pub(crate) prompt_lengths: Vec<i64>,
}

impl Cache {
    /// An empty cache on the default store, for a model of `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self::with_store(Box::new(GrowingKv::new(layers)))
    }

    /// An empty cache on a store of one's own, which must be empty: otherwise the first pass is refused, and leaves it as it
    /// is.
    pub fn with_store(store: Box<dyn KvStore>) -> Self {
        Self {
            store,
            id: CacheId::new(),
            len: 0,
            starts: Vec::new(),
            real: None,
            next: Vec::new(),
            prompt_lengths: Vec::new(),
        }
    }

    /// Tokens of each row so far, padding included.
    pub fn len(&self) -> i64 {
        self.len
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which cache it is, and how often its past was changed.
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Takes away what a pass that failed has appended.
    pub(crate) fn put_back(&mut self) {
        self.id.generation += 1;
        // What the store says now can't be worse than the pass's error.
        let _ = self.store.truncate(self.len);
    }

    /// The store.
    pub fn store(&self) -> &dyn KvStore {
        &*self.store
    }

    /// The store, to append to.
    pub(crate) fn store_mut(&mut self) -> &mut dyn KvStore {
        &mut *self.store
    }

    /// Passes so far: those of which a token is left, if the cache was [truncated](Self::truncate).
    pub fn steps(&self) -> usize {
        self.starts.len()
    }

    /// Forgets all but the first `len` tokens (padding included) of each row, and the passes that began after them.
    ///
    /// # Errors
    /// What the store reports.
    pub fn truncate(&mut self, len: i64) -> Result<()> {
        let len = len.clamp(0, self.len);
        self.id.generation += 1;
        self.store.truncate(len)?;
        let removed = self.len - len;
        self.len = len;
        self.starts.retain(|&start| start < len);
        match &mut self.real {
            Some(real) => {
                *real = real.f_narrow(1, 0, len)?;
                // Padding is on the left, so a row's length is what is left of its mask.
                let lengths = real.f_sum_dim_intlist([1i64].as_slice(), false, tensor::tch::Kind::Int64)?;
                self.next = Vec::<i64>::try_from(&lengths)?;
            }
            None => self.next.iter_mut().for_each(|next| *next -= removed),
        }
        if len == 0 {
            (self.real, self.next, self.prompt_lengths) = (None, Vec::new(), Vec::new());
        }
        Ok(())
    }

    /// Makes row `i` what row `rows[i]` was.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a row that isn't there, and what the store reports.
    pub fn select_rows(&mut self, rows: &[i64]) -> Result<()> {
        if let Some(bad) = rows.iter().find(|&&r| !(0..self.next.len() as i64).contains(&r)) {
            return Err(Error::invalid("rows", format!("below the {} rows of the cache", self.next.len()), bad));
        }
        let index = Tensor::from_slice(rows);
        self.id.generation += 1;
        self.store.select_rows(&index)?;
        if let Some(real) = &mut self.real {
            *real = real.f_index_select(0, &index.f_to_device(real.device())?)?;
        }
        let pick = |values: &[i64]| rows.iter().map(|&r| values[r as usize]).collect();
        self.next = pick(&self.next);
        self.prompt_lengths = pick(&self.prompt_lengths);
        Ok(())
    }

    /// An independent cache with the same tokens.
    ///
    /// # Errors
    /// What the store reports.
    pub fn fork(&self) -> Result<Self> {
        Ok(Self {
            store: self.store.fork()?,
            id: CacheId::new(),
            len: self.len,
            starts: self.starts.clone(),
            real: self.real.as_ref().map(Tensor::f_alias_copy).transpose()?,
            next: self.next.clone(),
            prompt_lengths: self.prompt_lengths.clone(),
        })
    }
}
