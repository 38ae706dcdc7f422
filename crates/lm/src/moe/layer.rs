//! The feed-forward of experts: route, gather, run each expert on its tokens, scatter.
