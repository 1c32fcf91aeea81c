//! Which of several processes this one is, as its launcher says in the environment.

use std::env;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The port where nothing else is asked for, that of torchrun.
const PORT: u16 = 29500;

/// The place of a process among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number on its machine, which is that of its GPU.
    pub local_rank: usize,
    /// Host of rank 0.
    pub address: String,
    /// Port that rank 0 listens on.
    pub port: u16,
}

/// How launchers name rank, number of processes, and rank on the machine. Kubernetes' indexed jobs run one process a pod.
const LAUNCHERS: [(&str, &str, Option<&str>); 4] = [
    ("RANK", "WORLD_SIZE", Some("LOCAL_RANK")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", Some("OMPI_COMM_WORLD_LOCAL_RANK")),
    ("SLURM_PROCID", "SLURM_NTASKS", Some("SLURM_LOCALID")),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE", None),
];

impl Place {
    /// The place that torchrun and its like (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), Open MPI (`OMPI_COMM_WORLD_…`), Slurm (`SLURM_PROCID`,
    /// `SLURM_NTASKS`, `SLURM_LOCALID`) or an indexed job of Kubernetes (`JOB_COMPLETION_INDEX`, `WORLD_SIZE`) give, the first of
    /// them that does; with `MASTER_ADDR` and `MASTER_PORT` (29500). None where there is one process. A launcher inside a launcher,
    /// such as torchrun below Slurm, is the one that counts.
    ///
    /// # Errors
    /// A variable that is no number, is missing beside others, or contradicts them, by name.
    pub fn from_environment() -> Result<Option<Place>> {
        Place::from(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Place>> {
        let known: &dyn Fn(&str) -> bool = &|name| get(name).is_some();
        // Slurm and Kubernetes count where they alone have started the process.
        let Some(&(rank_name, size_name, local_name)) = LAUNCHERS.iter().find(|(rank, size, _)| known(rank) && (known(size) || *rank == "RANK")) else {
            return match number::<usize>(&get, "WORLD_SIZE")? {
                Some(size) if size > 1 => Err(Error::option("WORLD_SIZE", format!("{size} processes, but RANK, which says which of them this is, is missing"))),
                _ => Ok(None),
            };
        };
        let rank = required::<usize>(&get, rank_name, "")?;
        let size = required::<usize>(&get, size_name, rank_name)?;
        if rank >= size {
            return Err(Error::option(rank_name, format!("{rank} is none of the ranks 0 to {} of {size_name}={size}", size.saturating_sub(1))));
        }
        // Open MPI speaks of single processes too, so it cannot differ from RANK; Slurm may have started launchers.
        let also = if rank_name == "RANK" { [LAUNCHERS[1].0, LAUNCHERS[1].1] } else { [rank_name, "WORLD_SIZE"] };
        for (name, value) in also.into_iter().zip([rank, size]) {
            if let Some(other) = number::<usize>(&get, name)?.filter(|other| *other != value) {
                return Err(Error::option(name, format!("{other} contradicts {rank_name}={rank} and {size_name}={size}")));
            }
        }
        let local_rank = local_name.map_or(Ok(None), |name| number::<usize>(&get, name))?.unwrap_or(0);
        if local_rank > rank {
            let name = local_name.unwrap_or(rank_name);
            return Err(Error::option(name, format!("{local_rank} is more than {rank_name}={rank}")));
        }
        if size == 1 {
            return Ok(None);
        }
        let address = required::<String>(&get, "MASTER_ADDR", size_name)?;
        let port = number::<u16>(&get, "MASTER_PORT")?.unwrap_or(PORT);
        Ok(Some(Place { rank, size, local_rank, address, port }))
    }
}

fn number<T: FromStr>(get: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>> {
    let Some(text) = get(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| Error::option(name, format!("`{text}` is no number that can stand here")))
}

fn required<T: FromStr>(get: &impl Fn(&str) -> Option<String>, name: &str, beside: &str) -> Result<T> {
    number(get, name)?.ok_or_else(|| Error::option(name, format!("is missing in the environment beside {beside}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &str) -> Result<Option<Place>> {
        Place::from(|name| variables.split(' ').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value.to_owned()))
    }

    #[test]
    fn launchers_are_understood() {
        let found = |variables: &str| place(variables).unwrap().map(|place| (place.rank, place.size, place.local_rank, place.port));
        let at = "MASTER_ADDR=host";
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 {at} MASTER_PORT=7")), Some((3, 4, 1, 7)));
        assert_eq!(found(&format!("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_NTASKS=2 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(place(&format!("RANK=1 WORLD_SIZE=2 {at}")).unwrap().unwrap().address, "host");
        for none in ["", "WORLD_SIZE=1", "RANK=0 WORLD_SIZE=1", "SLURM_PROCID=0 SLURM_NTASKS=1", "JOB_COMPLETION_INDEX=5", "MASTER_ADDR=host"] {
            assert_eq!(found(none), None, "{none}");
        }
    }

    #[test]
    fn contradictions_are_named() {
        let wrong = [
            ("WORLD_SIZE=2", "RANK"),
            ("WORLD_SIZE=two", "WORLD_SIZE"),
            ("RANK=0", "WORLD_SIZE"),
            ("RANK=x WORLD_SIZE=2", "RANK"),
            ("RANK=-1 WORLD_SIZE=2", "RANK"),
            ("RANK=2 WORLD_SIZE=2", "RANK"),
            ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE"),
            ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=host", "LOCAL_RANK"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=70000", "MASTER_PORT"),
            ("RANK=0 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 MASTER_ADDR=host", "OMPI_COMM_WORLD_RANK"),
            ("SLURM_PROCID=0 SLURM_NTASKS=2 WORLD_SIZE=3 MASTER_ADDR=host", "WORLD_SIZE"),
            ("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4 MASTER_ADDR=host", "JOB_COMPLETION_INDEX"),
        ];
        for (variables, name) in wrong {
            let error = place(variables).unwrap_err();
            assert!(error.is_misuse() && error.to_string().contains(name), "{variables}: {error}");
        }
    }
}
