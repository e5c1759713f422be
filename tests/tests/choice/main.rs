//! The choice: the best of all, with its reasons, and every rewrite row an equality.

mod brute;
mod cases;
mod explain;
mod mlp;
mod rows;
