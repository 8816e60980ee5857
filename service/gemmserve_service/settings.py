"""Every setting of the server: a field here, a ``GEMMSERVE_`` variable and a flag of ``gemmserve serve``."""

from __future__ import annotations

import ipaddress
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_DEVICE = re.compile(r"cpu|(cpu|cuda|rocm):\d{1,3}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/gemmserve``, by default ``~/.local/share/gemmserve``."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "gemmserve"


def parse_size(text: str) -> int:
    """Return the bytes that a text such as 1000000, 512M, 1G or 20 GiB says; units are powers of 1024, whether "B" or
    "iB" follows or not. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes: 1000000, 512M, 20GiB")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Settings(BaseSettings):
    """The server's configuration. Immutable; the supervisor hands it to its children as JSON."""

    model_config = SettingsConfigDict(
        env_prefix="GEMMSERVE_", env_parse_none_str="none", extra="ignore", frozen=True,
        allow_inf_nan=False,  # JSON has neither: the supervisor's children would not be told
    )  # fmt: skip

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 picks a free one")
    uds: Path | None = Field(
        None,
        description="path of a Unix socket to listen on besides, for clients of this machine; PATH.fds beside it takes "
        "arrays by shared memory (Linux)",
    )
    uds_mode: Literal["600", "660", "666"] = Field(
        "600", description="mode of these sockets: who may connect; 600 is this user alone, 660 the group too"
    )
    data_dir: Path = Field(default_factory=default_data_dir, description="arrays and the database live here")
    runtime_dir: Path | None = Field(
        None, description="folder for the control socket; default: a private temporary one"
    )
    device: str = Field(
        "auto",
        description="auto, cpu, or a comma-separated list such as cuda:0,cuda:1 or rocm:0; cpu:0,cpu:1 share the "
        "processors. none: of this host none, all workers join",
    )
    join_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="a port by which workers of other hosts join (`gemmserve worker`), with this server's TLS; null: "
        "none may. 0 picks a free one",
    )
    join_host: str = Field("127.0.0.1", description="address that this port listens on")
    join_silence_s: float = Field(
        7.0,
        gt=0,
        description="a joined worker's link over which nothing came for so long is given up, and its tasks run "
        "elsewhere; no longer than heartbeat_timeout_s",
    )
    join_insecure: bool = Field(
        default=False,
        description="let workers join without TLS beyond loopback: whoever is on the way reads tokens and arrays, and "
        "can change results",
    )
    probe_file: Path | None = Field(
        None,
        description="what `gemmserve probe` wrote on this host: rates by which it is decided whether a job waits for "
        "the device that has its operands; default: those of known devices",
    )
    keys_file: Path | None = Field(
        None,
        description="file of API keys besides those of `gemmserve keys`, such as a container's secret: a key a line, "
        "then, if need be, its name and its scopes",
    )
    cell: int = Field(
        0, ge=0, le=255, description="number of this server among the cells behind a router; it is in the ids it makes"
    )
    cells_file: Path | None = Field(
        None,
        description="JSON file of all cells: their numbers, their own URLs, and the secret by which they know each "
        "other; the same for all of them",
    )
    allow_unauthenticated: bool = Field(
        default=False, description="listen beyond loopback without API keys: anyone who reaches the port may use it"
    )
    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="further Host names that are answered besides the loopback ones"
    )

    tls_certificate: Path | None = Field(
        None, description="PEM file of the server's certificate and its chain: HTTPS instead of HTTP"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="a second port, without keys and TLS, for /metrics, health and pages; the metrics then leave the "
        "main one. 0 picks a free one",
    )
    metrics_host: str = Field("127.0.0.1", description="address that the second port listens on")
    trusted_proxies: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="addresses or networks of reverse proxies: their X-Forwarded-For and -Proto are believed, and the "
        "limit of connections per address does not hold for them",
    )
    audit_log: Path | None = Field(
        None, description="file to append the audit's JSON lines to; default: standard error, with the other logs"
    )

    transfer_processes: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        "auto",
        description="processes beside the front that move the bytes of large bodies (Linux; connections without TLS); "
        "0: the front does; auto: one for every four processors, four at most, and none below eight processors",
    )
    max_connections: int = Field(
        4096, ge=1, description="connections at one time; a further one takes the place of the longest idle"
    )
    max_connections_per_address: int = Field(1024, ge=1, description="of one address, likewise")
    max_shared_descriptors: int = Field(
        256,
        ge=0,
        description="pieces of shared memory that clients may have passed and not used yet; likewise regions that they "
        "may have registered by name",
    )
    max_head_bytes: int = Field(32 << 10, ge=1024, description="bytes of a request's line and headers")
    head_timeout_s: float = Field(10.0, gt=0, description="within which a request's line and headers must have come")
    keep_alive_s: float = Field(30.0, gt=0, description="how long a connection may stay idle between requests")
    min_body_rate: int = Field(
        1024, ge=0, description="bytes per second that a body must come with, or it is answered 408; 0: any"
    )
    body_window_s: float = Field(10.0, gt=0, description="span over which the body's rate is taken")
    send_stall_s: float = Field(
        60.0, gt=0, description="a client that takes nothing of its answer for so long is cut off"
    )

    max_array_bytes: int = Field(16 << 30, ge=1, description="largest single array, in bytes")
    max_part_bytes: int = Field(
        95_000_000, ge=1, description="largest part of an upload in parts; many proxies take no body above 100 MB"
    )
    max_uploads: int = Field(
        1024, ge=1, description="uploads in parts that one owner may have begun and not completed; one more is 429"
    )
    upload_idle_s: float = Field(
        3600.0, gt=0, description="an upload in parts of which nothing was heard for so long is given up"
    )
    max_store_bytes: int | None = Field(
        None, ge=0, description="bytes of all arrays together; null: what the disk holds"
    )
    tier: str | None = Field(
        None,
        description="address below which arrays go that were not used for long, when the store fills up: "
        "s3://bucket/prefix, gs://, az:// or file:///folder; credentials come from the environment. Needs the extra "
        "tier",
    )
    max_tier_bytes: int | None = Field(None, ge=0, description="bytes of all arrays in the tier; null: no limit")
    tier_high_water: float = Field(
        0.9, gt=0, le=1, description="share of max_store_bytes above which arrays leave for the tier"
    )
    tier_adopt: bool = Field(
        default=False,
        description="take over the arrays of a tier whose data directory is lost, by the records beside them",
    )
    max_scratch_bytes: int | None = Field(
        None,
        ge=0,
        description="memory for operands and results of one-shot requests; null: a quarter of the machine's. "
        "Past it they go to files under data_dir, within max_store_bytes",
    )
    host_arena_bytes: int | None = Field(
        None,
        ge=0,
        description="memory that results come to from accelerators before they go to files; null: a quarter of "
        "the machine's; 0: none, they go to files at once. Without an accelerator there is none",
    )
    arena_ahead_bytes: int | None = Field(
        None,
        ge=0,
        description="of it, what each worker registers with its driver as it starts, so that copies go straight there; "
        "null: an eighth of the machine's memory. From then on it is twice of what was in use at most",
    )
    peer_copies: Literal["auto", "always", "never"] = Field(
        "auto",
        description="panels of large products go from one of this host's devices to the others, with auto while a "
        "device would wait for the host's memory; CUDA devices with a way between them",
    )
    recycle_bytes: int = Field(1 << 30, ge=0, description="freed extents kept for reuse, in bytes")
    default_ttl_s: float | None = Field(
        None, gt=0, description="life of an upload that names none; null: until deleted"
    )
    result_ttl_s: float | None = Field(
        86_400.0, gt=0, description="life of a result whose job names none; null: until deleted"
    )

    max_queued_jobs: int = Field(10_000, ge=1, description="jobs that may wait; one more is answered 429")
    max_queued_bytes: int = Field(
        1 << 36,
        ge=1,
        description="bytes of results of the jobs that wait, and of one-shots; past them 429, for all but one",
    )
    max_batch_items: int = Field(10_000, ge=1, description="products of one request to /v1/batch")
    max_batch_bytes: int = Field(
        1 << 32, ge=1, description="bytes of a body sent to /v1/batch, and of the results that it is answered with"
    )
    max_grouped_jobs: int = Field(
        64, ge=1, description="short jobs that waited and go to a worker together at most; 1: each goes alone"
    )
    max_program_steps: int = Field(
        1000, ge=1, description="steps of one program, and results that it keeps; more are answered 422"
    )
    max_queued_steps: int = Field(
        20_000, ge=1, description="steps of all programs that wait or run; past them 429, for all but one program"
    )
    max_attempts: int = Field(3, ge=1, description="workers a job may lose before it fails with worker-crashed")
    heartbeat_timeout_s: float = Field(
        30.0, gt=0, description="a worker that gave no sign of life for so long is killed and started again"
    )
    verify_share: float = Field(
        0.001, ge=0, le=1, description="share of all products that are checked without having been asked for"
    )
    hang_s: float = Field(
        120.0, gt=0, description="a job's worker is killed when the job has not got on for so long and hang_factor"
    )
    hang_factor: float = Field(20.0, ge=0, description="... times its estimated time more")
    max_wait_s: float = Field(60.0, ge=0, description="longest long poll, in seconds")
    oneshot_timeout_s: float | None = Field(300.0, gt=0, description="deadline of a one-shot request; null: none")
    idempotency_ttl_s: float = Field(
        86_400.0, gt=0, description="how long an Idempotency-Key is remembered, in seconds"
    )
    job_history_s: float = Field(
        7 * 86_400.0, gt=0, description="how long finished jobs and expired ids are remembered"
    )
    drain_s: float = Field(20.0, ge=0, description="seconds that running jobs get to finish after SIGTERM")
    durability: Literal["process", "power", "replicated"] = Field(
        "process",
        description="process: what was answered survives the death of any process; power: of the machine too "
        "(every commit waits for the disk); replicated: and the tier has every array before it is answered",
    )
    block_side: int = Field(
        4096,
        ge=16,
        le=1 << 20,
        description="rows and columns of the blocks in which products of 128 times its cube of operations and more are "
        "computed; another number may change the last bits of their results",
    )
    device_memory_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="bytes of a device's memory that may be used; null: all of it. Large products stream through what "
        "there is. For a processor: what copies of panels of large products may take; null: no more than they need",
    )
    device_cache_share: float = Field(
        0.75, ge=0, le=0.95, description="share of a device's memory that may hold copies of arrays, and results"
    )
    write_back_delay_s: float = Field(
        0.5,
        ge=0,
        le=60,
        description="a job's result may stay on its device alone for so long, one of 16 MiB and more for half of it, "
        "a smaller one eight times as long while the device has other tasks, unless somebody asks for it, and in the "
        "host arena for so long again, before it is written; deleted until then, it is not written at all",
    )

    executor: Literal["local", "ray"] = Field(
        "local",
        description="ray: workers on other hosts, which are started, restarted and scaled by Ray and join by the join "
        "port (extra `ray`)",
    )
    ray_address: str = Field(
        "auto", description="of Ray's head, host:port; auto: the cluster that this machine is a node of"
    )
    ray_namespace: str = Field(
        "gemmserve", min_length=1, description="Ray's namespace of the workers; one server has it alone"
    )
    ray_join_url: str | None = Field(
        None, description="URL by which Ray's nodes reach the join port, such as https://front.example:8443"
    )
    ray_token_file: Path | None = Field(
        None, description="file of the token with which workers join, made by `gemmserve keys create --scope worker`"
    )
    ray_device: Literal["cuda", "rocm", "cpu"] = Field(
        "cuda", description="what a worker of Ray's has: one GPU, or ray_cpus processors"
    )
    ray_cpus: float = Field(1.0, ge=0, description="processors of its node that each worker reserves")
    ray_min_workers: int = Field(1, ge=0, description="workers that Ray keeps while there is nothing to do")
    ray_max_workers: int = Field(8, ge=1, description="workers that Ray may be asked for")
    ray_jobs_per_worker: int = Field(
        8, ge=1, description="jobs that wait or run for each of which so many there is to be a worker"
    )
    ray_idle_s: float = Field(
        300.0, ge=0, description="a worker that was not needed for so long ends, and its node may go"
    )
    ray_orphan_s: float = Field(
        600.0, ge=60, description="a worker of a server that was not to be reached for so long ends by itself"
    )

    trace_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the requests that come without a trace (traceparent) and begin one, where "
        "OpenTelemetry's variables say where traces go",
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe line that is logged"
    )
    log_json: bool = Field(default=False, description="log JSON lines instead of text")

    @field_validator("device", mode="before")
    @classmethod
    def _read_none(cls, value: object) -> object:
        return "none" if value is None else value  # a variable that says none is read as no value at all

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        value = value.strip().lower()
        if value in {"auto", "none"}:
            return value
        names = value.split(",")
        if not all(_DEVICE.fullmatch(name) for name in names):
            raise ValueError(f"device {value!r} is not auto, cpu, cpu:N, cuda:N or rocm:N, a list of these, or none")
        if len(set(names)) != len(names):
            raise ValueError(f"device {value!r} names one device twice")
        return value

    @field_validator("allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator(
        "min_body_rate", "max_head_bytes", "max_array_bytes", "max_part_bytes", "max_store_bytes", "max_tier_bytes",
        "max_scratch_bytes",
        "device_memory_bytes", "host_arena_bytes", "arena_ahead_bytes", "recycle_bytes", "max_queued_bytes",
        "max_batch_bytes", mode="before",
    )  # fmt: skip
    @classmethod
    def _read_size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @field_validator(
        "uds",
        "data_dir",
        "runtime_dir",
        "keys_file",
        "cells_file",
        "tls_certificate",
        "tls_key",
        "audit_log",
        "ray_token_file",
    )
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: list[str]) -> list[str]:
        for text in value:
            ipaddress.ip_network(text, strict=False)
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        return self

    @model_validator(mode="after")
    def _check_ray(self) -> Self:
        if self.executor == "ray" and self.join_port is None:
            raise ValueError("executor ray needs a join_port, by which workers come")
        if self.executor == "ray" and self.ray_join_url is None:
            raise ValueError("executor ray needs ray_join_url, by which Ray's nodes reach this server")
        if self.ray_min_workers > self.ray_max_workers:
            raise ValueError("ray_min_workers is more than ray_max_workers")
        return self

    @model_validator(mode="after")
    def _check_join(self) -> Self:
        if self.join_port is None:
            if self.device == "none":
                raise ValueError("device none needs a join_port, by which workers come")
            return self
        if self.tls_certificate is None and not (is_loopback(self.join_host) or self.join_insecure):
            raise ValueError(
                f"workers would join by {self.join_host} without TLS: set tls_certificate and tls_key, or "
                "join_insecure where nobody else is on that network"
            )
        return self

    @model_validator(mode="after")
    def _check_tier(self) -> Self:
        if self.tier is not None and re.fullmatch(r"(s3|gs|az|file)://\S+", self.tier) is None:
            raise ValueError(f"tier {self.tier!r} is none of s3://bucket/prefix, gs://, az://, file:///folder")
        if self.durability == "replicated" and self.tier is None:
            raise ValueError("durability=replicated needs a tier")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        return is_loopback(self.host)
