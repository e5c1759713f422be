//! A rank's memory: zeroed, present before the first step, aligned to pages, and never moved.

use memmap2::MmapMut;

use super::error::RunError;

/// Small enough to touch every page of every kind.
const PAGE: usize = 4096;

/// One rank's memory.
#[derive(Debug)]
pub struct Arena {
    map: MmapMut,
    bytes: usize,
}

impl Arena {
    /// Asks for `bytes`, and touches all of them, so that no step pays for it.
    pub fn new(bytes: usize) -> Result<Arena, RunError> {
        // The system gives no map of 0 bytes.
        let mut map = MmapMut::map_anon(bytes.max(1)).map_err(|source| RunError::Memory { bytes, source })?;
        // Only a wish: where there are no huge pages, small ones do.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_mut_ptr();
        for at in (0..bytes).step_by(PAGE) {
            // SAFETY: inside the map. Volatile, for a write of 0 to fresh memory has no other effect than the wanted one.
            unsafe { start.add(at).write_volatile(0) };
        }
        Ok(Arena { map, bytes })
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it starts. Stays so while the arena lives.
    pub fn start(&mut self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// All of it. Only while no rank runs.
    pub fn all(&self) -> &[u8] {
        &self.map[..self.bytes]
    }
}
