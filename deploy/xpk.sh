#!/usr/bin/env bash
# Submits a training run to a GKE cluster that xpk made. Exit code 75 restarts it: the run resumes.
#
#   IMAGE=... CLUSTER=... BUCKET=... deploy/xpk.sh NAME --config=configs/demo.py [--config.field=...]
#
# IMAGE: built by deploy/Dockerfile and pushed. The bucket is mounted at /gcs/BUCKET; attach it once:
#   xpk storage attach "$BUCKET" --type=gcsfuse --bucket="$BUCKET" --mount-point="/gcs/$BUCKET" \
#       --auto-mount=false --readonly=false --cluster="$CLUSTER" --size=1024
# The workdir is gs://BUCKET/runs/NAME. TPU_TYPE: v6e-8. XPK_FLAGS: more words for xpk.
set -euo pipefail
: "${IMAGE:?an image that deploy/Dockerfile built}" "${CLUSTER:?a cluster that xpk made}"
: "${BUCKET:?the bucket of the workdir}" "${TPU_TYPE:=v6e-8}" "${XPK_FLAGS:=}"
name=${1:?usage: deploy/xpk.sh NAME --config=...}
shift
read -ra flags <<< "$XPK_FLAGS"
# exec: xpk signals the child of its own shell, which must be python for the run to save in time.
printf -v train '%q ' exec python -m agentrl_jax.train "--workdir=gs://$BUCKET/runs/$name" "$@"
exec xpk workload create --workload="$name" --cluster="$CLUSTER" --tpu-type="$TPU_TYPE" \
  --docker-image="$IMAGE" --storage="$BUCKET" --command="$train" \
  --max-restarts=1000 --restart-on-exit-codes=75 \
  --env=JAX_COORDINATOR_ADDRESS="${JAX_COORDINATOR_ADDRESS:-auto}" \
  --env=JAX_COMPILATION_CACHE_DIR="/gcs/$BUCKET/runs/programs" "${flags[@]}"
