//! How many processes of one job share the host.

use std::num::NonZero;

/// What launchers tell each of their processes: torchrun, Open MPI, Intel MPI and MPICH, and SLURM. SLURM's is that of a step, such as
/// `8(x4)` or `8,4`.
const TOLD: [&str; 4] =
    ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"];

/// The number of processes that whoever has started this one tells of; 1 if none does.
pub(crate) fn told() -> NonZero<u32> {
    told_by(|name| std::env::var(name).ok())
}

fn told_by(variable: impl Fn(&str) -> Option<String>) -> NonZero<u32> {
    TOLD.iter().find_map(|name| most(&variable(name)?)).unwrap_or(NonZero::<u32>::MIN)
}

/// The greatest of the numbers of a list, without how often each occurs.
fn most(list: &str) -> Option<NonZero<u32>> {
    list.split(',').filter_map(|entry| entry.split('(').next()?.trim().parse().ok()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_tell_how_many_processes_share_the_host() {
        let told = |name: &str, value: &str| told_by(|asked| (asked == name).then(|| value.to_owned())).get();
        assert_eq!(told("LOCAL_WORLD_SIZE", "8"), 8);
        assert_eq!(told("SLURM_STEP_TASKS_PER_NODE", "4(x2),6"), 6);
        assert_eq!(told("PATH", "8"), 1);
        for nonsense in ["", "0", "-1", "many", "4294967296", "(x2)"] {
            assert_eq!(told("LOCAL_WORLD_SIZE", nonsense), 1, "{nonsense}");
        }
    }
}
