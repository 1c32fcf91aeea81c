//! Which of several processes this one is, as its launcher says in the environment.

use std::env;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The port where nothing else is asked for, that of torchrun.
const PORT: u16 = 29500;
/// Ports that are tried one after the other, where nobody has named one for this program alone.
const TRIES: u16 = 8;

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
    /// Ports that rank 0 may listen on: the first that is free.
    pub ports: Vec<u16>,
    /// What tells the processes of this run from those of others that use the same ports.
    pub run: u64,
}

/// The variables in which a launcher says what a process is.
struct Launcher {
    rank: &'static str,
    size: &'static str,
    /// Rank on the machine, and processes on it.
    local: Option<(&'static str, &'static str)>,
    /// Machines of the run, the first of which has rank 0.
    machines: Option<&'static str>,
    /// What names a run.
    run: &'static [&'static str],
}

/// torchrun and its like, Open MPI, Slurm, and indexed jobs of Kubernetes, which run one process a pod.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        rank: "RANK",
        size: "WORLD_SIZE",
        local: Some(("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        machines: None,
        // Agents do not agree on how often they have started their processes anew.
        run: &["TORCHELASTIC_RUN_ID"],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: Some(("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
        machines: None,
        run: &["PMIX_NAMESPACE"],
    },
    Launcher {
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local: Some(("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
        machines: Some("SLURM_STEP_NODELIST"),
        run: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    Launcher { rank: "JOB_COMPLETION_INDEX", size: "WORLD_SIZE", local: None, machines: None, run: &[] },
];

impl Place {
    /// The place that torchrun and its like (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), Open MPI (`OMPI_COMM_WORLD_…`), Slurm (`SLURM_PROCID`,
    /// `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`) or an indexed job of Kubernetes (`JOB_COMPLETION_INDEX`, `WORLD_SIZE`) give, the first of
    /// them that does. None where there is one process. A launcher inside a launcher, such as torchrun below Slurm, is the one that counts.
    ///
    /// Rank 0 is at `MASTER_ADDR`; without it, on the first machine that Slurm names, or on this one where all processes are. It listens
    /// on `MASTER_PORT`. Where torchrun's agent does so itself, it takes the first free one of the eight ports behind; where there is no
    /// `MASTER_PORT`, of eight from a place on that the run's name decides, or 29500.
    ///
    /// # Errors
    /// A variable that is no number, is missing beside others, or contradicts them, by name.
    pub fn from_environment() -> Result<Option<Place>> {
        Place::from(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Place>> {
        let known: &dyn Fn(&str) -> bool = &|name| get(name).is_some();
        // Slurm and Kubernetes count where they alone have started the process; a script of Slurm's that starts it itself is no step.
        let Some(launcher) = LAUNCHERS.iter().find(|launcher| known(launcher.rank) && (known(launcher.size) || launcher.rank == "RANK")) else {
            return match number::<usize>(&get, "WORLD_SIZE")? {
                Some(size) if size > 1 => Err(Error::option("WORLD_SIZE", format!("{size} processes, but RANK, which says which of them this is, is missing"))),
                _ => Ok(None),
            };
        };
        let (rank_name, size_name) = (launcher.rank, launcher.size);
        let rank = required::<usize>(&get, rank_name, "")?;
        let size = required::<usize>(&get, size_name, rank_name)?;
        if rank >= size {
            return Err(Error::option(rank_name, format!("{rank} is none of the ranks 0 to {} of {size_name}={size}", size.saturating_sub(1))));
        }
        // Open MPI speaks of single processes too, so it cannot differ from RANK; Slurm may have started launchers.
        let also = if rank_name == "RANK" { [LAUNCHERS[1].rank, LAUNCHERS[1].size] } else { [rank_name, "WORLD_SIZE"] };
        for (name, value) in also.into_iter().zip([rank, size]) {
            if let Some(other) = number::<usize>(&get, name)?.filter(|other| *other != value) {
                return Err(Error::option(name, format!("{other} contradicts {rank_name}={rank} and {size_name}={size}")));
            }
        }
        let local_rank = launcher.local.map_or(Ok(None), |(name, _)| number::<usize>(&get, name))?.unwrap_or(0);
        if local_rank > rank {
            let name = launcher.local.map_or(rank_name, |(name, _)| name);
            return Err(Error::option(name, format!("{local_rank} is more than {rank_name}={rank}")));
        }
        if size == 1 {
            return Ok(None);
        }
        let all_here = launcher.local.and_then(|(_, count)| get(count)).is_some_and(|count| count == size.to_string());
        let first = launcher.machines.and_then(&get).and_then(|machines| first_of(&machines));
        let address = match (get("MASTER_ADDR"), all_here, first) {
            (Some(address), ..) => address,
            (None, true, _) => "127.0.0.1".into(),
            (None, false, Some(first)) => first,
            (None, false, None) => required::<String>(&get, "MASTER_ADDR", size_name)?,
        };
        let mut run = blake3::Hasher::new();
        let mut named = false;
        for name in launcher.run {
            let value = get(name);
            named |= value.is_some();
            run.update(format!("{name}={value:?}").as_bytes());
        }
        let port = number::<u16>(&get, "MASTER_PORT")?;
        run.update(format!("{port:?}").as_bytes());
        let run = u64::from_le_bytes(std::array::from_fn(|at| run.finalize().as_bytes()[at]));
        let agent = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let from = |first: u16| (0..TRIES).map(|number| first.checked_add(number).unwrap_or(PORT + number)).collect();
        let ports = match port {
            Some(port) if !agent => vec![port],
            Some(port) => from(port.checked_add(1).unwrap_or(PORT)),
            None if named => from(PORT + (run % 1000) as u16),
            None => vec![PORT],
        };
        Ok(Some(Place { rank, size, local_rank, address, ports, run }))
    }
}

/// The first host of a list as Slurm writes it: `node[003-017,21],other`.
fn first_of(machines: &str) -> Option<String> {
    let end = machines.find(',').unwrap_or(machines.len());
    let first = match machines.find('[').filter(|open| *open < end) {
        Some(open) => {
            let numbers = &machines[open + 1..open + machines[open..].find(']')?];
            let behind = machines[open..].split_once(']')?.1;
            let behind = &behind[..behind.find(',').unwrap_or(behind.len())];
            format!("{}{}{behind}", &machines[..open], numbers.split([',', '-']).next()?)
        }
        None => machines[..end].to_owned(),
    };
    // Lists of several dimensions are left to MASTER_ADDR.
    (!first.is_empty() && !first.contains(['[', ']'])).then_some(first)
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
        let found = |variables: &str| place(variables).unwrap().map(|place| (place.rank, place.size, place.local_rank, place.ports[0]));
        let at = "MASTER_ADDR=host";
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 {at} MASTER_PORT=7")), Some((3, 4, 1, 7)));
        assert_eq!(found(&format!("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(place(&format!("RANK=1 WORLD_SIZE=2 {at}")).unwrap().unwrap().address, "host");
        let address = |variables: &str| place(variables).unwrap().unwrap().address;
        assert_eq!(address("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3"), "127.0.0.1");
        assert_eq!(address("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=node[007-008]"), "node007");
        for none in [
            "",
            "WORLD_SIZE=1",
            "RANK=0 WORLD_SIZE=1",
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            "JOB_COMPLETION_INDEX=5",
            "MASTER_ADDR=host",
            "SLURM_PROCID=0 SLURM_NTASKS=2",
        ] {
            assert_eq!(found(none), None, "{none}");
        }
    }

    #[test]
    fn ports_are_those_that_the_launcher_leaves_free() {
        let ports = |variables: &str| place(&format!("MASTER_ADDR=host {variables}")).unwrap().unwrap().ports;
        let torchrun = "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none";
        assert_eq!(ports(&format!("{torchrun} MASTER_PORT=700 TORCHELASTIC_USE_AGENT_STORE=True")), (701..709).collect::<Vec<_>>());
        assert_eq!(ports(&format!("{torchrun} MASTER_PORT=700 TORCHELASTIC_USE_AGENT_STORE=False")), [700]);
        let high = ports(&format!("{torchrun} MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True"));
        assert!(high.len() == 8 && !high.contains(&65535), "{high:?}");
        assert_eq!(ports("RANK=0 WORLD_SIZE=2"), [PORT]);
        // Two runs on a machine begin elsewhere, all processes of one at the same place.
        let slurm = |rank, job| ports(&format!("SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID={job} SLURM_STEP_ID=0"));
        assert_eq!(slurm(0, 71), slurm(1, 71));
        assert_ne!(slurm(0, 71), slurm(0, 72));
    }

    #[test]
    fn the_first_machine_of_a_list_is_found() {
        let lists = [("a", "a"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("n[003-017,21],other", "n003"), ("gpu[1-2].site,b", "gpu1.site"), ("a,n[1-2]", "a")];
        for (list, first) in lists {
            assert_eq!(first_of(list).unwrap(), first);
        }
        for list in ["", "n[1-2]m[3-4]", "n[1"] {
            assert_eq!(first_of(list), None, "{list}");
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
            ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 WORLD_SIZE=3 MASTER_ADDR=host", "WORLD_SIZE"),
            ("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4 MASTER_ADDR=host", "JOB_COMPLETION_INDEX"),
        ];
        for (variables, name) in wrong {
            let error = place(variables).unwrap_err();
            assert!(error.is_misuse() && error.to_string().contains(name), "{variables}: {error}");
        }
    }
}
