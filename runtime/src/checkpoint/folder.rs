//! The folder of a run's checkpoints: which there are, which is the newest that can be used, and which are removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use super::write::{failed, sync_folder};
use super::{Checkpoint, CheckpointError, index};

/// The name of the folder of a step's checkpoint.
pub(super) fn name_of(step: usize) -> String {
    format!("step-{step:06}")
}

/// The step of a checkpoint's folder; none if it is called otherwise.
fn step_of(name: &str) -> Option<usize> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

/// Whether a folder is a checkpoint, whole or not.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(index::FILE).is_file()
}

/// The checkpoints in a folder, the oldest first; none if it does not exist.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(dir: &Path) -> Result<Vec<(usize, PathBuf)>, CheckpointError> {
    let names = names(dir)?;
    let mut all: Vec<_> = names.iter().filter_map(|n| Some((step_of(n)?, dir.join(n)))).collect();
    all.sort();
    Ok(all)
}

fn names(dir: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(dir, "read the folder")(e)),
    };
    let name = |entry: io::Result<fs::DirEntry>| entry.map(|e| e.file_name().to_string_lossy().into_owned());
    entries.map(name).collect::<io::Result<_>>().map_err(failed(dir, "read the folder"))
}

/// The newest checkpoint of a folder, every file of it checked; none if there is none.
///
/// # Errors
/// It is damaged: then the message says which older one is whole. Nothing is changed.
pub fn newest(dir: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
    let mut all = list(dir)?;
    let Some((_, folder)) = all.pop() else { return Ok(None) };
    let source = match Checkpoint::open(&folder) {
        Ok(checkpoint) => return Ok(Some(checkpoint)),
        Err(error) => Box::new(error),
    };
    let older = all.into_iter().rev().map(|(_, f)| f).find(|f| Checkpoint::open(f).is_ok());
    Err(CheckpointError::Newest { source, folder, older })
}

/// Removes what runs that were killed left half written or half removed.
///
/// # Errors
/// What the system refuses.
pub fn clean(dir: &Path) -> Result<(), CheckpointError> {
    for name in names(dir)?.iter().filter(|n| n.starts_with(".step-") && n.ends_with(".part")) {
        remove(&dir.join(name))?;
    }
    Ok(())
}

/// Removes all checkpoints but the newest `keep`.
///
/// # Errors
/// What the system refuses.
pub fn prune(dir: &Path, keep: usize) -> Result<(), CheckpointError> {
    let all = list(dir)?;
    for (step, folder) in all.iter().take(all.len().saturating_sub(keep)) {
        // A removal that is cut short must not leave a checkpoint that looks damaged.
        let aside = part(dir, &name_of(*step));
        fs::rename(folder, &aside).map_err(failed(folder, "remove"))?;
        sync_folder(dir)?;
        remove(&aside)?;
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(folder, "remove")(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn part(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}.{}.part", process::id()))
}

/// A folder being written, removed when it is dropped, if it still has its first name.
pub(super) struct Aside(pub(super) PathBuf);

impl Aside {
    pub(super) fn new(dir: &Path, name: &str) -> Result<Aside, CheckpointError> {
        let path = part(dir, name);
        // Left by a process that was killed and had the same number.
        remove(&path)?;
        fs::create_dir(&path).map_err(failed(&path, "make the folder"))?;
        Ok(Aside(path))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
