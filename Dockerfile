# Images of one server: docker build --target cpu|cuda|rocm|ray|cuda-ray . (docker-compose.yml has their settings).
# Packages are those of deploy/locks, with hashes; `make lock` makes the locks again.
ARG PYTHON_IMAGE=python:3.12-slim
ARG ROCM_IMAGE=rocm/dev-ubuntu-24.04:7.0

# -- What the server needs: an environment without pip -------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS packages
# Where pip finds packages is the builder's business: secrets that leave no trace in a layer, and need not be given.
ENV PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY deploy/locks/build.txt deploy/locks/cpu.txt deploy/locks/
RUN --mount=type=secret,id=pip,target=/run/secrets/pip --mount=type=secret,id=ca,target=/run/secrets/ca \
    python -m venv /opt/build \
    && python -m venv --without-pip /opt/gemmserve \
    && /opt/build/bin/pip install --quiet --require-hashes -r deploy/locks/build.txt \
    && /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --require-hashes -r deploy/locks/cpu.txt \
    && find /opt/gemmserve -type d -name tests -path '*/numpy/*' -prune -exec rm -r '{}' +

# -- The project's wheel, and what it puts into that environment: the layer that changes with the code --------------------
FROM packages AS project
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client client
COPY kernels kernels
COPY service service
RUN /opt/build/bin/pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheel . \
    && /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --no-index --no-deps \
        --prefix /opt/project /wheel/*.whl

# -- CUDA from wheels; what the driver has comes with the container toolkit ------------------------------------------------
FROM packages AS packages-cuda
COPY deploy/locks/cuda13.txt deploy/locks/
RUN --mount=type=secret,id=pip,target=/run/secrets/pip --mount=type=secret,id=ca,target=/run/secrets/ca \
    /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --require-hashes -r deploy/locks/cuda13.txt

# The kernels of documented products, compiled for these architectures, so that no request for one waits for a compiler.
FROM packages-cuda AS kernels-cuda
ARG KERNEL_ARCHITECTURES="sm_80 sm_86 sm_89 sm_90a sm_100 sm_120"
COPY kernels kernels
ENV PYTHONPATH=/src/kernels GEMMSERVE_KERNEL_CACHE=/opt/kernels
RUN /opt/gemmserve/bin/python -m gemmserve_kernels.precompile ${KERNEL_ARCHITECTURES} \
    && chmod -R a+rX /opt/kernels

# -- cpu -----------------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
# A number, so that an orchestrator can see that it is not root. Volumes take the owner of the folders they cover.
RUN install -d -o 10001 -g 10001 -m 700 /var/lib/gemmserve /var/cache/gemmserve
ENV PATH=/opt/gemmserve/bin:$PATH \
    HOME=/var/lib/gemmserve \
    PYTHONUNBUFFERED=1 \
    GEMMSERVE_HOST=0.0.0.0 \
    GEMMSERVE_DATA_DIR=/var/lib/gemmserve \
    GEMMSERVE_KERNEL_CACHE=/var/cache/gemmserve
USER 10001:10001
WORKDIR /var/lib/gemmserve
VOLUME ["/var/lib/gemmserve", "/var/cache/gemmserve"]
EXPOSE 8000 9464
HEALTHCHECK --interval=2s --timeout=5s --start-period=120s --retries=5 \
    CMD ["python", "-I", "-m", "gemmserve_service.processes.healthcheck"]
ENTRYPOINT ["gemmserve"]
CMD ["serve"]

FROM base AS cpu
COPY --from=packages /opt/gemmserve /opt/gemmserve
COPY --from=project /opt/project /opt/gemmserve

# -- cuda ----------------------------------------------------------------------------------------------------------------
FROM base AS cuda
COPY --from=packages-cuda /opt/gemmserve /opt/gemmserve
COPY --from=kernels-cuda /opt/kernels /opt/kernels
COPY --from=project /opt/project /opt/gemmserve
# A worker loads from there what its cache lacks: a volume that is older than the image is no worse off.
# NVIDIA_...: what is asked of NVIDIA's container toolkit, the driver's compute library and nvidia-smi.
ENV GEMMSERVE_KERNEL_SEED=/opt/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# -- ray, cuda-ray: Ray besides, for its nodes and for a server that asks it for workers (docs/cluster-launchers.md) --------
FROM packages AS packages-ray
COPY deploy/locks/ray.txt deploy/locks/
# What the environment has already stays as it is: the locks agree.
RUN --mount=type=secret,id=pip,target=/run/secrets/pip --mount=type=secret,id=ca,target=/run/secrets/ca \
    /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --require-hashes --prefix /opt/ray \
        -r deploy/locks/ray.txt

# Ray asks for the name of its user, and number 10001 has none.
FROM cpu AS ray
COPY --from=packages-ray /opt/ray /opt/gemmserve
ENV USER=gemmserve RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

FROM cuda AS cuda-ray
COPY --from=packages-ray /opt/ray /opt/gemmserve
ENV USER=gemmserve RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

# -- rocm: ROCm's libraries and compiler from AMD's packages, which that image has the sources of ---------------------------
FROM ${ROCM_IMAGE} AS base-rocm
# What cupy-rocm-7-0's files say that they load (readelf -d), and hipcc with the headers that it compiles with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        hip-dev hip-runtime-amd hipblas hipcc hipcub-dev hipfft hiprand hipsparse rccl rocblas rocfft \
        rocm-device-libs rocprim-dev rocrand rocsolver rocsparse rocthrust-dev roctracer \
        python3 python3-venv python-is-python3 \
    && rm -rf /var/lib/apt/lists/*

FROM base-rocm AS packages-rocm
ENV PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY deploy/locks/build.txt deploy/locks/rocm.txt deploy/locks/
COPY --from=project /wheel /wheel
RUN --mount=type=secret,id=pip,target=/run/secrets/pip --mount=type=secret,id=ca,target=/run/secrets/ca \
    python -m venv /opt/build \
    && python -m venv --without-pip /opt/gemmserve \
    && /opt/build/bin/pip install --quiet --require-hashes -r deploy/locks/build.txt \
    && /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --require-hashes -r deploy/locks/rocm.txt \
    && /opt/build/bin/pip --python /opt/gemmserve/bin/python install --quiet --no-index --no-deps /wheel/*.whl

FROM packages-rocm AS kernels-rocm
ARG ROCM_KERNEL_ARCHITECTURES="gfx90a gfx942"
ENV ROCM_HOME=/opt/rocm GEMMSERVE_KERNEL_CACHE=/opt/kernels
RUN /opt/gemmserve/bin/python -m gemmserve_kernels.precompile ${ROCM_KERNEL_ARCHITECTURES} \
    && chmod -R a+rX /opt/kernels

FROM base-rocm AS rocm
RUN install -d -o 10001 -g 10001 -m 700 /var/lib/gemmserve /var/cache/gemmserve
# CuPy's own cache of what HIPRTC compiled lies in the volume of the kernels, too.
ENV PATH=/opt/gemmserve/bin:/opt/rocm/bin:$PATH \
    HOME=/var/lib/gemmserve \
    PYTHONUNBUFFERED=1 \
    ROCM_HOME=/opt/rocm \
    CUPY_CACHE_DIR=/var/cache/gemmserve/cupy \
    GEMMSERVE_KERNEL_SEED=/opt/kernels \
    GEMMSERVE_HOST=0.0.0.0 \
    GEMMSERVE_DATA_DIR=/var/lib/gemmserve \
    GEMMSERVE_KERNEL_CACHE=/var/cache/gemmserve
COPY --from=packages-rocm /opt/gemmserve /opt/gemmserve
COPY --from=kernels-rocm /opt/kernels /opt/kernels
USER 10001:10001
WORKDIR /var/lib/gemmserve
VOLUME ["/var/lib/gemmserve", "/var/cache/gemmserve"]
EXPOSE 8000 9464
HEALTHCHECK --interval=2s --timeout=5s --start-period=120s --retries=5 \
    CMD ["python", "-I", "-m", "gemmserve_service.processes.healthcheck"]
ENTRYPOINT ["gemmserve"]
CMD ["serve"]
