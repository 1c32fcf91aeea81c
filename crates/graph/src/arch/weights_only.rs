//! Families in builds without the feature `run`: descriptions without graphs.

/// Never exists: graphs need the feature `run`.
pub type GraphBuilder = std::convert::Infallible;

macro_rules! graph {
    ($build:path) => {
        None
    };
}
