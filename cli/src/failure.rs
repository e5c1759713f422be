//! How a command fails: what is said, and the exit status.

use ir::dsl::BuildError;
use models::ModelError;
use planner::cluster::ClusterError;
use planner::planfile::PlanFileError;
use planner::rules::RuleError;
use runtime::checkpoint::CheckpointError;
use runtime::data::DataError;
use runtime::files::FileError;
use runtime::local::RunError;

/// Why a command failed. [`Failure::status`] is its exit status.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The request makes no sense.
    #[error("{0}")]
    Request(String),
    /// A part that is not built yet.
    #[error("{0} is not built yet")]
    NotBuilt(String),
    /// A config that is no model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A model's own source.
    #[error("the model is inconsistent:\n{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Build(Vec<BuildError>),
    /// A cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A rules file.
    #[error(transparent)]
    Rules(#[from] RuleError),
    /// Training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file that was given.
    #[error(transparent)]
    File(#[from] FileError),
    /// A plan file.
    #[error("{0}: {1}")]
    Plan(String, PlanFileError),
    /// A file that could not be written.
    #[error("{0}")]
    Write(String),
    /// The run failed.
    #[error("{0}")]
    Run(String),
    /// The backend.
    #[error(transparent)]
    Local(#[from] RunError),
    /// A checkpoint that is damaged or cannot be written.
    #[error("{0}")]
    Checkpoint(CheckpointError),
    /// A check found a fault.
    #[error("{}", .0.join("\n"))]
    Check(Vec<String>),
}

impl Failure {
    /// 2 if the request makes no sense, 1 if the run failed.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Request(_)
            | Failure::NotBuilt(_)
            | Failure::Model(_)
            | Failure::Build(_)
            | Failure::Cluster(_)
            | Failure::Rules(_)
            | Failure::Data(_)
            | Failure::File(_)
            | Failure::Plan(..) => 2,
            Failure::Write(_)
            | Failure::Run(_)
            | Failure::Local(_)
            | Failure::Checkpoint(_)
            | Failure::Check(_) => 1,
        }
    }
}
