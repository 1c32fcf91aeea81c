#!/bin/sh
# Submits all parts of a run to Slurm, followed by the merge job: submit.sh RECIPE OUTPUT [PARTS [ROUNDS]]
# A global threshold (`scope: global`) needs ROUNDS: 2 for 16-bit weights, 3 for float32. Finished parts are not
# computed again.
set -eu
recipe=$1 output=$2 parts=${3:-16} rounds=${4:-1}
folder=$(dirname "$0")
after=
while [ "$rounds" -gt 0 ]; do
    after=$(sbatch --parsable ${after:+--dependency=afterok:$after} --array="1-$parts" --export="ALL,PARTS=$parts" "$folder/parts.sbatch" "$recipe" "$output")
    rounds=$((rounds - 1))
done
sbatch --parsable --dependency="afterok:$after" --job-name=compress-merge --cpus-per-task=4 --mem=1G --wrap="compress merge '$output'"
