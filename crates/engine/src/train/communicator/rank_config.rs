//! Rank, world size and rendezvous address of this process, from the environment variables of its launcher.

use std::env;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Default port, the same as torchrun's.
const PORT: u16 = 29500;
/// Number of consecutive ports that are tried if `MASTER_PORT` does not name one for this program.
const PORT_COUNT: u16 = 8;

/// Rank of a process and rendezvous address of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankConfig {
    /// Rank, from 0.
    pub rank: usize,
    /// Number of processes (world size).
    pub size: usize,
    /// Rank on this machine, used as the index of the GPU.
    pub local_rank: usize,
    /// Host of rank 0.
    pub address: String,
    /// Candidate ports; rank 0 listens on the first that is free.
    pub ports: Vec<u16>,
    /// Identifies the run, so that processes of different runs on the same ports do not connect.
    pub run: u64,
}

/// Environment variables of a launcher.
struct Launcher {
    rank: &'static str,
    size: &'static str,
    /// Local rank, and number of processes on this machine.
    local: Option<(&'static str, &'static str)>,
    /// List of the machines; rank 0 runs on the first.
    machines: Option<&'static str>,
    /// Variables that identify the run.
    run: &'static [&'static str],
}

/// torchrun and compatible launchers, Open MPI, Slurm, and indexed jobs of Kubernetes, which run one
/// process per pod.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        rank: "RANK",
        size: "WORLD_SIZE",
        local: Some(("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        machines: None,
        // The restart count is not included: agents of different machines may disagree on it.
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

impl RankConfig {
    /// Reads the variables of the first launcher that set them: torchrun and compatible launchers
    /// (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), Open MPI (`OMPI_COMM_WORLD_…`), Slurm (`SLURM_PROCID`,
    /// `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`), or an indexed job of Kubernetes
    /// (`JOB_COMPLETION_INDEX`, `WORLD_SIZE`). With nested launchers, such as torchrun under Slurm, the
    /// inner one is used. Returns `None` for a single process.
    ///
    /// The address of rank 0 is `MASTER_ADDR`, otherwise the first machine of Slurm's list, otherwise
    /// this machine if all processes run on it. Its port is `MASTER_PORT`. If torchrun's agent occupies
    /// that port, it is the first free one of the following eight ports. Without `MASTER_PORT`, it is
    /// the first free one of eight ports derived from the run's name, or 29500 without a name. Fails if a
    /// variable is not a number, is missing, or contradicts another one; the error names the variable.
    pub fn from_environment() -> Result<Option<RankConfig>> {
        RankConfig::from_variables(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<RankConfig>> {
        let is_set: &dyn Fn(&str) -> bool = &|name| get(name).is_some();
        // A process started directly by a Slurm batch script is not a step, and has no SLURM_STEP_NUM_TASKS.
        let Some(launcher) = LAUNCHERS.iter().find(|launcher| is_set(launcher.rank) && (is_set(launcher.size) || launcher.rank == "RANK")) else {
            return match number::<usize>(&get, "WORLD_SIZE")? {
                Some(size) if size > 1 => Err(Error::option("WORLD_SIZE", format!("{size} processes, but RANK, the rank of this process, is not set"))),
                _ => Ok(None),
            };
        };
        let (rank_name, size_name) = (launcher.rank, launcher.size);
        let rank = required::<usize>(&get, rank_name, size_name)?;
        let size = required::<usize>(&get, size_name, rank_name)?;
        if rank >= size {
            return Err(Error::option(rank_name, format!("{rank} is not a rank from 0 to {} of {size_name}={size}", size.saturating_sub(1))));
        }
        // Open MPI sets its variables in every process, so they must equal RANK; those of Slurm may
        // describe outer launchers.
        let also = if rank_name == "RANK" { [LAUNCHERS[1].rank, LAUNCHERS[1].size] } else { [rank_name, "WORLD_SIZE"] };
        for (name, value) in also.into_iter().zip([rank, size]) {
            if let Some(other) = number::<usize>(&get, name)?.filter(|other| *other != value) {
                return Err(Error::option(name, format!("{other} contradicts {rank_name}={rank} and {size_name}={size}")));
            }
        }
        let local_rank = launcher.local.map_or(Ok(None), |(name, _)| number::<usize>(&get, name))?.unwrap_or(0);
        if local_rank > rank {
            let name = launcher.local.map_or(rank_name, |(name, _)| name);
            return Err(Error::option(name, format!("{local_rank} is greater than {rank_name}={rank}")));
        }
        if size == 1 {
            return Ok(None);
        }
        let is_local = launcher.local.and_then(|(_, count)| get(count)).is_some_and(|count| count == size.to_string());
        let first = launcher.machines.and_then(&get).and_then(|machines| first_machine(&machines));
        let address = match (get("MASTER_ADDR"), is_local, first) {
            (Some(address), ..) => address,
            (None, true, _) => "127.0.0.1".into(),
            (None, false, Some(first)) => first,
            (None, false, None) => required::<String>(&get, "MASTER_ADDR", size_name)?,
        };
        let mut run = blake3::Hasher::new();
        let mut is_named = false;
        for name in launcher.run {
            let value = get(name);
            is_named |= value.is_some();
            run.update(format!("{name}={value:?}").as_bytes());
        }
        let port = number::<u16>(&get, "MASTER_PORT")?;
        run.update(format!("{port:?}").as_bytes());
        let run = u64::from_le_bytes(std::array::from_fn(|at| run.finalize().as_bytes()[at]));
        let agent = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let from = |first: u16| (0..PORT_COUNT).map(|number| first.checked_add(number).unwrap_or(PORT + number)).collect();
        let ports = match port {
            Some(port) if !agent => vec![port],
            Some(port) => from(port.checked_add(1).unwrap_or(PORT)),
            None if is_named => from(PORT + (run % 1000) as u16),
            None => vec![PORT],
        };
        Ok(Some(RankConfig { rank, size, local_rank, address, ports, run }))
    }
}

/// The first host of a Slurm node list such as `node[003-017,21],other`.
fn first_machine(machines: &str) -> Option<String> {
    let end = machines.find(',').unwrap_or(machines.len());
    let first = match machines.find('[').filter(|open| *open < end) {
        Some(open) => {
            let numbers = &machines[open + 1..open + machines[open..].find(']')?];
            let suffix = machines[open..].split_once(']')?.1;
            let suffix = &suffix[..suffix.find(',').unwrap_or(suffix.len())];
            format!("{}{}{suffix}", &machines[..open], numbers.split([',', '-']).next()?)
        }
        None => machines[..end].to_owned(),
    };
    // Names with several ranges are not supported; such runs set MASTER_ADDR.
    (!first.is_empty() && !first.contains(['[', ']'])).then_some(first)
}

fn number<T: FromStr>(get: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>> {
    let Some(text) = get(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| Error::option(name, format!("`{text}` is not a valid number for this variable")))
}

fn required<T: FromStr>(get: &impl Fn(&str) -> Option<String>, name: &str, given: &str) -> Result<T> {
    number(get, name)?.ok_or_else(|| Error::option(name, format!("is not set, but {given} is")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &str) -> Result<Option<RankConfig>> {
        RankConfig::from_variables(|name| {
            variables.split(' ').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        })
    }

    #[test]
    fn launchers_are_recognized() {
        let found = |variables: &str| config(variables).unwrap().map(|it| (it.rank, it.size, it.local_rank, it.ports[0]));
        let at = "MASTER_ADDR=host";
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 {at} MASTER_PORT=7")), Some((3, 4, 1, 7)));
        assert_eq!(found(&format!("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 {at}")), Some((3, 4, 1, PORT)));
        assert_eq!(found(&format!("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(found(&format!("RANK=3 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 {at}")), Some((3, 4, 0, PORT)));
        assert_eq!(config(&format!("RANK=1 WORLD_SIZE=2 {at}")).unwrap().unwrap().address, "host");
        let address = |variables: &str| config(variables).unwrap().unwrap().address;
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
    fn ports_of_the_launcher_are_avoided() {
        let ports = |variables: &str| config(&format!("MASTER_ADDR=host {variables}")).unwrap().unwrap().ports;
        let torchrun = "RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none";
        assert_eq!(ports(&format!("{torchrun} MASTER_PORT=700 TORCHELASTIC_USE_AGENT_STORE=True")), (701..709).collect::<Vec<_>>());
        assert_eq!(ports(&format!("{torchrun} MASTER_PORT=700 TORCHELASTIC_USE_AGENT_STORE=False")), [700]);
        let high = ports(&format!("{torchrun} MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True"));
        assert!(high.len() == 8 && !high.contains(&65535), "{high:?}");
        assert_eq!(ports("RANK=0 WORLD_SIZE=2"), [PORT]);
        // Two runs on a machine start at different ports; all processes of a run at the same port.
        let slurm = |rank, job| ports(&format!("SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID={job} SLURM_STEP_ID=0"));
        assert_eq!(slurm(0, 71), slurm(1, 71));
        assert_ne!(slurm(0, 71), slurm(0, 72));
    }

    #[test]
    fn the_first_machine_of_a_node_list_is_found() {
        let lists = [("a", "a"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("n[003-017,21],other", "n003"), ("gpu[1-2].site,b", "gpu1.site"), ("a,n[1-2]", "a")];
        for (list, first) in lists {
            assert_eq!(first_machine(list).unwrap(), first);
        }
        for list in ["", "n[1-2]m[3-4]", "n[1"] {
            assert_eq!(first_machine(list), None, "{list}");
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
            let error = config(variables).unwrap_err();
            assert!(error.is_misuse() && error.to_string().contains(name), "{variables}: {error}");
        }
    }
}
