//! Which tokens are edited.

use crate::{Error, Result};
use lm::hooks::TokenInfo;
use serde::{Deserialize, Serialize};
use tensor::tch::{Device, Kind, Tensor};

/// Which tokens a plan edits. Padding never is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenMask {
    /// All tokens, position 0 included. In many models position 0 is an attention sink, with activations a hundred times as
    /// large as all others, and must be left alone.
    All,
    /// All tokens but that of position 0.
    #[default]
    AllExceptFirst,
    /// The last token of the prompt.
    LastPromptToken,
    /// Generated tokens only.
    GeneratedOnly,
    /// Tokens of this position in their own text or of a later one.
    FromPosition(i64),
    /// By row of the prompts as they were given, and by position in the row's own text. What lies beyond a list isn't edited.
    Explicit(Vec<Vec<bool>>),
}

impl TokenMask {
    /// Whether each token of a pass is edited, row by row. None: every token is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an explicit mask without a row; what libtorch reports.
    pub(super) fn of(&self, tokens: &TokenInfo<'_>) -> Result<Option<Vec<bool>>> {
        if *self == Self::All && tokens.real.is_none() {
            return Ok(None);
        }
        let shape = tokens.positions.size();
        let time = shape.get(1).map_or(0, |&time| time as usize);
        let positions = Vec::<i64>::try_from(&tokens.positions.f_to_device(Device::Cpu)?.f_reshape([-1])?)?;
        let real = match tokens.real {
            None => None,
            Some(real) => {
                let flat = real.f_to_kind(Kind::Uint8)?.f_to_device(Device::Cpu)?.f_reshape([-1])?;
                Some(Vec::<u8>::try_from(&flat)?)
            }
        };
        if let Self::Explicit(rows) = self
            && let Some(row) = tokens.rows.iter().find(|&&row| row >= rows.len())
        {
            return Err(Error::invalid("the explicit mask", format!("of at least {} rows", row + 1), rows.len()));
        }
        let edited = |(at, &position): (usize, &i64)| {
            if real.as_ref().is_some_and(|real| real[at] == 0) {
                return false;
            }
            let row = at / time.max(1);
            let prompt = tokens.prompt_lengths.get(row).copied().unwrap_or(0);
            match self {
                Self::All => true,
                Self::AllExceptFirst => position > 0,
                Self::LastPromptToken => position == prompt - 1,
                Self::GeneratedOnly => position >= prompt,
                Self::FromPosition(first) => position >= *first,
                Self::Explicit(rows) => {
                    let row = tokens.rows.get(row).and_then(|&row| rows.get(row));
                    row.and_then(|row| row.get(position as usize)).copied().unwrap_or(false)
                }
            }
        };
        let mask: Vec<bool> = positions.iter().enumerate().map(edited).collect();
        Ok(if mask.iter().all(|&edited| edited) { None } else { Some(mask) })
    }

    /// The rows `[tokens]` (i64) of a flattened pass that a mask edits.
    pub(super) fn rows(mask: &[bool], device: Device) -> Result<Tensor> {
        let rows: Vec<i64> = mask.iter().enumerate().filter(|(_, edited)| **edited).map(|(at, _)| at as i64).collect();
        Ok(Tensor::f_from_slice(&rows)?.f_to_device(device)?)
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for a negative first position.
    pub(super) fn validate(&self) -> Result<()> {
        match self {
            Self::FromPosition(first) if *first < 0 => Err(Error::invalid("from_position", "at least 0", first)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows: three tokens; one padding and two tokens. Prompts of 2 and 1.
    fn masked(mask: &TokenMask) -> Vec<bool> {
        let positions = Tensor::from_slice(&[0i64, 1, 2, 0, 0, 1]).view([2, 3]);
        let real = Tensor::from_slice(&[true, true, true, false, true, true]).view([2, 3]);
        let info =
            TokenInfo { positions: &positions, real: Some(&real), prompt_lengths: &[2, 1], rows: &[1, 0], step: 0 };
        mask.of(&info).unwrap().unwrap_or_else(|| vec![true; 6])
    }

    #[test]
    fn each_mask_edits_the_tokens_of_its_name_and_never_padding() {
        let (t, f) = (true, false);
        for (mask, expected) in [
            (TokenMask::All, [t, t, t, f, t, t]),
            (TokenMask::AllExceptFirst, [f, t, t, f, f, t]),
            (TokenMask::LastPromptToken, [f, t, f, f, t, f]),
            (TokenMask::GeneratedOnly, [f, f, t, f, f, t]),
            (TokenMask::FromPosition(2), [f, f, t, f, f, f]),
            // The rows were given in the other order.
            (TokenMask::Explicit(vec![vec![t, f], vec![f, f, t]]), [f, f, t, f, t, f]),
        ] {
            assert_eq!(masked(&mask), expected, "{mask:?}");
        }
    }

    #[test]
    fn a_row_that_an_explicit_mask_lacks_is_an_error() {
        let positions = Tensor::from_slice(&[0i64]).view([1, 1]);
        let info = TokenInfo { positions: &positions, real: None, prompt_lengths: &[1], rows: &[3], step: 0 };
        let message = TokenMask::Explicit(vec![vec![true]]).of(&info).unwrap_err().to_string();
        assert!(message.contains("at least 4 rows"), "{message}");
    }
}
