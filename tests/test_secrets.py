"""Secrets of every form, planted at every entry: no file or stream has one, and what reports are about stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.probes.live_arrays import LiveArraysProbe
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.records.runs import MemoryEvent, Unavailable
from jaxmem_callbacks.records.secrets import HIDDEN, scrubbed, secret_values, without_secrets
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.writers.protocol import Record, Writer
from tests import forked, sample_plans
from tests.oom_reports import hostile_report

# Text -> what must not be left of it. Values are made up, in the forms that the rules of secret scanners know.
FORMS = {
    "an argument in a list": ("['run.py', '--api-key', 'otter7', '--steps', '5']", "otter7"),
    "an argument in JSON": ('["--db-password", "otter7"]', "otter7"),
    "an argument": ("run.py --auth-token otter7 --steps 5", "otter7"),
    "a quoted argument": ("--db-password 'otter seven'", "seven"),
    "PASS": ("SMTP_PASS=otter7", "otter7"),
    "PWD": ("MYSQL_PWD=otter7", "otter7"),
    "PW": ("FTP_PW=otter7", "otter7"),
    "CREDS": ("REGISTRY_CREDS=otter7", "otter7"),
    "an address of a database": ("DATABASE_URL=postgresql://app:otter7@db:5432/main", "otter7"),
    "a DSN": ("SENTRY_DSN=https://otter7@o1.ingest.sentry.io/4", "otter7"),
    "a password with a slash": ("mysql://app:ot/ter7@db.internal:3306/x", "ter7"),
    "a password with an at": ("amqp://app:ot@ter7@mq/vhost", "ter7"),
    "a password without a user": ("redis://:otter7@cache:6379/0", "otter7"),
    "a quoted password": ("mongodb+srv://app:ot%40ter7@c0.mongodb.net/x", "ter7"),
    "Oracle's": ("jdbc:oracle:thin:app/otter7@db:1521:x", "otter7"),
    "a proxy": ("https_proxy=app:otter7@proxy:3128", "otter7"),
    "SQL Server": ("Server=tcp:x,1433;User Id=app;Password=otter seven;Encrypt=yes", "seven"),
    "Azure's storage": ("DefaultEndpointsProtocol=https;AccountName=n;AccountKey=otter7==;EndpointSuffix=x", "otter7"),
    "Azure's bus": ("Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey=otter7=", "otter7"),
    "JSON in JSON": (r'{"body": "{\"password\": \"otter7\", \"n\": 1}"}', "otter7"),
    "JSON in JSON in JSON": (r'"{\\\"client_secret\\\": \\\"otter7\\\"}"', "otter7"),
    "an arrow": ("'password' => 'otter7'", "otter7"),
    "an arrow without quotes": ("password => otter7", "otter7"),
    "an index": ("config['password'] = 'otter7'", "otter7"),
    "YAML": ("db:\n  password: otter seven\n  port: 1", "seven"),
    "a block of YAML": ("password: |\n  otter7\n  more7\nport: 1", "more7"),
    "netrc": ("machine h.example login app password otter7", "otter7"),
    "netrc on lines": ("machine h.example\n  login app\n  password otter7", "otter7"),
    "pgpass": ("db.internal:5432:main:app:otter7", "otter7"),
    "a name and a value apart": ('{"name": "DB_PASSWORD", "value": "otter7"}', "otter7"),
    "XML": ("<password>otter7</password>", "otter7"),
    "NuGet's": ('<add key="Password" value="otter7" />', "otter7"),
    "a table": ("| DB_PASSWORD | otter7 |", "otter7"),
    "camel case": ("clientSecret: otter7", "otter7"),
    "a header": ("X-Api-Key: otter7", "otter7"),
    "a pair of a header": ("('Authorization', 'Basic b3R0ZXI3')", "b3R0ZXI3"),
    "a cookie": ("Cookie: theme=dark; sid=otter7", "otter7"),
    "curl": ("curl -u app:otter7 https://h", "otter7"),
    "sshpass": ("sshpass -p otter7 ssh h", "otter7"),
    "mysql": ("mysql -u root -potter7 main", "otter7"),
    "an access token": ("https://h/cb#access_token=otter7", "otter7"),
    "Slack's webhook": ("https://hooks.slack.com/services/T0/B0/otter7", "otter7"),
    "Discord's webhook": ("https://discord.com/api/webhooks/12/otter7", "otter7"),
    "Teams' webhook": ("https://x.webhook.office.com/webhookb2/a@b/IncomingWebhook/otter7/c", "otter7"),
    "Telegram's": ("https://api.telegram.org/bot123:otter7/sendMessage", "otter7"),
    "an access key's id": ("AWS_ACCESS_KEY_ID=otter7", "otter7"),
    "a secret key": ("aws_secret_access_key = otter7", "otter7"),
    "Google's": ("GOCSPX-0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "Alibaba's": ("LTAI0a1b2c3d4e5f6g7h", "0a1b2c3d4e5f"),
    "Databricks'": ("dapi0123456789abcdef0123456789abcdef", "0123456789abcdef"),
    "DigitalOcean's": ("dop_v1_0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "GitLab's runner": ("glrt-0a1b2c3d4e5f6g7h8i9j", "0a1b2c3d4e5f"),
    "Vault's": ("hvs.0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "Anthropic's": ("sk-ant-api03-0a1b2c3d", "0a1b2c3d"),
    "Perplexity's": ("pplx-0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "xAI's": ("xai-0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "Docker's": ("dckr_pat_0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "OpenShift's": ("sha256~0a1b2c3d4e5f6g7h8i9j", "0a1b2c3d4e5f"),
    "Figma's": ("figd_0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "Vercel's": ("vcp_0a1b2c3d4e5f6g7h", "0a1b2c3d4e5f"),
    "Aiven's": ("AVNS_0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    "CircleCI's": ("CCIPAT_0a1b2c3d4e5f6g7h_0123", "0a1b2c3d4e5f"),
    "Grafana's": ("glsa_0a1b2c3d4e5f6g7h8i9j", "0a1b2c3d4e5f"),
    "New Relic's": ("NRAK-0A1B2C3D4E5F", "0A1B2C3D4E5F"),
    "Mailchimp's": ("0123456789abcdef0123456789abcdef-us12", "0123456789abcdef"),
    "a crypt hash": ("app:$2b$12$otter7otter7otter7", "otter7otter7"),
    "a vendor's opaque value": ("heroku_app: 01234567-89ab-cdef-0123-456789abcdef", "456789abcdef"),
    "PGP": ("-----BEGIN PGP PRIVATE KEY BLOCK-----\notter7\n-----END PGP PRIVATE KEY BLOCK-----", "otter7"),
    "a key that was cut off": ("-----BEGIN OPENSSH PRIVATE KEY-----\notter7", "otter7"),
    "a quote that was cut off": ("password='otter7", "otter7"),
    "a value with its quote": (r'password="ot\"ter7"', "ter7"),
    "bytes": ("password=b'otter7'", "otter7"),
    "an item": ("passwords=['lynx', 'otter7']", "otter7"),
    "an item in JSON in JSON": (r'{"body": "{\"secrets\": [\"lynx\", \"otter7\"], \"n\": 1}"}', "otter7"),
    "a name in braces": ("{user: app, api_keys: {a: lynx, b: otter7}, n: 1}", "otter7"),
    "an item of an item": ('{"credentials": {"user": "app", "more": [1, {"value": "otter7"}]}, "n": 3}', "otter7"),
    "lines of JSON": ('{\n  "passwords": [\n    "lynx",\n    "otter7"\n  ],\n  "n": 1\n}', "otter7"),
    "lines of Python": ("passwords = [\n    'lynx',  # the first\n    'otter7',\n]\nn = 1", "otter7"),
    "a later item of YAML": ("api_keys:\n  - lynx\n\n  - otter7\nport: 1", "otter7"),
    "items of YAML at its own indent": ("x:\n  secrets:\n  - lynx\n  - otter7\n  port: 1", "otter7"),
    "a mapping of YAML": ("credentials:\n  user: app\n  value: otter7\nport: 1", "otter7"),
    "tokens that are no text's": ("tokens: [tokA9x, ot9ter7]", "ot9ter7"),
    "a pair that logs in": ("auth=('app', 'otter7')", "otter7"),
    "a call": ("db_password=SecretStr('otter7')", "otter7"),
    "a call by itself": ("(SecretStr('otter7'), 3)", "otter7"),
    "a call under a weak name": ("token=Secret(value='otter7')", "otter7"),
    "a class that logs in": ("HTTPDigestAuth('app', 'otter7')", "otter7"),
    "a login": ("wandb.login(key='otter7')", "otter7"),
    "a login without a name": ("huggingface_hub.login('otter7')", "otter7"),
    "braces": ("Driver={x};Server=h;PWD={lynx;otter7};Database=d", "otter7"),
    "braces with a brace": ("jdbc:sqlserver://h;password={ly}}nx;otter7};user=app", "otter7"),
    "ODBC": ("Server=h;UID=app;PWD=otter7;Database=d", "otter7"),
    "the value first": ('{"value": "otter7", "name": "DB_PASSWORD"}', "otter7"),
    "the value first in YAML": ("- value: otter7\n  name: DB_PASSWORD", "otter7"),
    "the value first in XML": ('<add value="otter7" key="Password"/>', "otter7"),
    "a continued line": ("--password \\\n  otter7 --steps 5", "otter7"),
    "an option's second word": ("run.py --api-keys lynx otter7 --steps 5", "otter7"),
    "an option's second argument": ("['run.py', '--passwords', 'lynx', 'otter7', '--steps', '5']", "otter7"),
    "curl in one word": ("curl -sSuapp:otter7 https://h", "otter7"),
    "curl's options together": ("curl -su app:otter7 https://h", "otter7"),
    "docker": ("docker login -u app -p otter7 registry", "otter7"),
    "docker's arguments": ("['docker', 'login', '-u', 'app', '-p', 'otter7']", "otter7"),
    "docker on lines": ("docker login \\\n  -u app \\\n  -p otter7", "otter7"),
    "Azure's command": ("az login --service-principal -u app -p otter7 --tenant t", "otter7"),
    "Redis' command": ("redis-cli -h cache -a otter7 ping", "otter7"),
    "openssl": ("openssl rsa -in k -passin pass:otter7", "otter7"),
    "zip": ("sudo /usr/bin/zip -P otter7 a.zip b", "otter7"),
    "7z": ("7z x -potter7 a.7z", "otter7"),
    "htpasswd": ("htpasswd -bc users app otter7", "otter7"),
    "LDAP": ("ldapsearch -x -D cn=app -w otter7 -b dc=x", "otter7"),
    "Samba": ("smbclient //h/share -U app%otter7", "otter7"),
    "a quoted address in a query": ("next=https%3A%2F%2Fapp%3Aotter7%40h", "otter7"),
    "a quoted query": ("x=password%3Dotter7%26n%3D1", "otter7"),
    "a client's key": ("client-key-data: otter7", "otter7"),
    "a key of TLS": ("tls_key: otter7", "otter7"),
    "SSH2": ("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\notter7", "otter7"),
    "conda": ("https://conda.example.org/t/tk-1234-otter7/main", "otter7"),
    "a table of commas": ("name,password,n\napp,lynx,1\nweb,otter7,2\n", "otter7"),
    "a quoted cell": ('name,password\napp,"lynx,otter7"\n', "otter7"),
    "a table of lines": ("| user | password |\n|---|---|\n| app | otter7 |", "otter7"),
}
HARMLESS = (
    "tokens: int32[8,1024], token_embedding/kernel: bf16[50304,768], num_tokens=4096, next token: 12",
    "%infeed-token = token[] after-all(), metadata={op_name='jit(step)/jvp(Block_3)/dot' source_file='train.py:4'}",
    "ROOT %fusion.12 = f32[256,1024]{1,0:T(8,128)} fusion(%p.1, %p.2), kind=kLoop, calls=%fused_computation.12",
    "dropout_key: key<fry>[], rng_key=0, params_key='params', forward_pass: 3.2 GiB, the second pass: 12",
    "jit_train_step-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "fingerprint=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "/data/me/.cache/pip/wheels/aa/bb/site-packages/jax/_src/interpreters/pxla.py:1234:in __call__",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
    "_ZN7cutlass6KernelI58cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x4_tn_align8EE",
    "task-0123456, disk-usage, mask-12345678, wandb_project=mine, key-value-store, npm_config_cache",
    "https://github.com/jax-ml/jax/blob/jax-v0.10.2/README.md and pkg@v1.2, http://localhost:8080/@vite/client",
    "step = jm.jit_step(step, policy)  # signature: (state, batch), auth: none, password=None, author: Jane",
    "tokens per second: [1, 2], num_tokens=512, max_token_len: 12, keys: [params, opt_state], key=jax.random.key(0)",
    '_BATCH_KEYS = ("multiple_of", "at_most", "argnames")',
    "tokens: [int32[8,1024], float8_e4m3fn, layer_0], tokens=ShapeDtypeStruct(shape=(8, 1024), dtype=int32)",
    "tokens:\n  - int32[8]\n  - f32[3]\ntoken=Array([[50256, 1]], dtype=int32) rng_key_data: uint32[2]",
    "password.yaml:3: unknown key, y/secret.yaml:3:5: x, nope_secret.log:12, train_secret.py:12:in step",
    "PWD=/data/x OLDPWD=~/a; docker run -p 8080:80 image; unzip -p a.zip; mysql -p main; ssh -p 22 h; 7z l a.7z",
    "login() user.login(request) def check_password(user, password): TokenEmbedding('x', 3) password=getpass.getpass()",
    "step,token,loss\n1,512,0.3\n2,513,0.2\n",
    '{"name": "layer_1", "value": "kernel"}, value="abc", key="params", https://discuss.x.org/t/topic-name/123',
    "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true --xla_dump_to=/tmp/x TOKENIZERS_PARALLELISM=false",
    "9" * 400,
    'env: { GH_TOKEN: "${{ github.token }}" }',
    "WANDB_API_KEY: ${{ secrets.WANDB_API_KEY }}",
    "password: {{ vault.database_password }}",
)


@pytest.mark.parametrize(("text", "secret"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_secret_is_hidden_and_once_is_enough(text, secret):
    hidden = without_secrets(text, ())
    assert secret in text
    assert secret not in hidden
    assert HIDDEN in hidden
    assert without_secrets(hidden, ()) == hidden


@pytest.mark.parametrize("text", HARMLESS, ids=range(len(HARMLESS)))
def test_what_reports_are_about_stays(text):
    assert without_secrets(text, ()) == text


def test_a_reference_hides_nothing_that_is_no_reference():
    for text in ('GH_TOKEN: "${{ github.token }}hunter2secret9"', "password: {{ 'hunter2secret9' }}"):
        assert "hunter2secret9" not in without_secrets(text, ())


WRITTEN = st.recursive(
    st.sampled_from(("'otter7'", '"otter7"', "b'otter7'", "SecretStr('otter7')", 'os.path("otter7")')),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: "(" + ",\n    ".join(items) + ",)"),
        st.tuples(inner, inner).map(lambda two: "{'a]': " + two[0] + ', "b}": ' + two[1] + "}"),
        inner.map(lambda item: f"dict(user='app', value={item})"),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    name=st.sampled_from(("password", "db_passwords", "API_KEYS", "client-secret", '"credentials"', "'auth_token'")),
    mark=st.sampled_from(("=", " = ", ": ", ":", " => ")),
    value=WRITTEN,
    after=st.sampled_from((", lr=0.1)", "}, 'n': 3}", "\nport: 1", " and more", "")),
)
def test_a_value_is_hidden_whole_however_it_is_written_and_what_is_around_it_stays(name, mark, value, after):
    before = "\nConfig(steps=5, "
    hidden = without_secrets(f"{before}{name}{mark}{value}{after}", ())
    assert "otter7" not in hidden
    assert hidden.startswith(f"{before}{name}{mark}")
    assert hidden.endswith(after)
    assert without_secrets(hidden, ()) == hidden


def _nested(leaf: object) -> st.SearchStrategy[object]:
    return st.recursive(
        st.just(leaf),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, st.integers(0, 9)),
            st.dictionaries(st.sampled_from(("a", "value", "user")), inner, min_size=1),
        ),
        max_leaves=5,
    )


@settings(deadline=None)
@given(value=st.sampled_from(("otter7", b"otter7", 70_707_070)).flatmap(_nested))
def test_whatever_a_secrets_key_holds_is_hidden(value):
    made = scrubbed({"db": {"password": value}, "n": 70_707, "passing": "lynx"}, ())
    assert not any(secret in repr(made) for secret in ("otter7", "70707070"))
    assert (made["n"], made["passing"]) == (70_707, "lynx")


def test_this_projects_own_documents_and_recordings_hold_no_secret():
    root = Path(__file__).parent
    files = [*root.glob("golden/**/*"), *root.glob("data/*"), *root.parent.glob("docs/**/*.md")]
    texts = [path.read_text("utf-8") for path in files if path.is_file()]
    assert sum(map(len, texts)) > 300_000
    changed = [line for text in texts for line in text.splitlines() if without_secrets(line, ()) != line]
    assert changed == []


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "a://" * 25_000,
        "password" * 12_500,
        'password="' * 10_000,
        "\\" * 100_000,
        "a:b@c" * 20_000,
        "aB1" * 33_000,
        "password=[\n" * 10_000,
        "token=(" * 14_000 + ")" * 1000,
        "value=" * 16_000,
        "SecretStr(login(" * 6_000,
        "login mysql -p " * 6_000,
        "password:\n  - x\n" * 6_000,
        "name,password," * 7_000,
    ],
    ids=[
        *("a word", "addresses", "names", "quotes", "escapes", "logins", "mixed"),
        *("brackets", "weak names", "values", "calls", "commands", "YAML", "columns"),
    ],
)
def test_time_grows_with_the_text_alone(text):
    began = time.process_time()
    without_secrets(text, ())
    assert time.process_time() - began < 3.0


def test_values_of_the_environment_are_hidden_in_each_form_in_which_they_are_written():
    known = secret_values(
        {
            "REGISTRY_PASS": 'ot"ter/7',
            "DATABASE_URL": "postgres://app:lynx%2F9@db/x",
            "PWD": "/data/project",
            "NUM_TOKENS": "1048576",
            "FEATURE_TOKEN": "false",
            "PIN_PASS": "123456",
            "DEBUG_PASSPHRASES": "['sable77', 'stoat88']",
        }
    )
    for form in ('ot"ter/7', r"ot\"ter/7", "ot%22ter%2F7", "lynx%2F9", "lynx/9"):
        assert without_secrets(f"it was {form}!", known) == f"it was {HIDDEN}!"
    assert without_secrets("one was stoat88!", known) == f"one was {HIDDEN}!"
    for kept in ("/data/project/train.py", "1048576 bytes", "false", "91234567 bytes"):
        assert without_secrets(kept, known) == kept


def test_names_and_neighbours_in_records_hide_their_values():
    given = {
        "argv": ["train.py", "--token", "otter7"],
        "db_password": "lynx9",
        "rows": [("api_key", "puma3"), ("x", "f32[8]")],
    }
    assert scrubbed(given, ()) == {
        "argv": ["train.py", "--token", HIDDEN],
        "db_password": HIDDEN,
        "rows": [("api_key", HIDDEN), ("x", "f32[8]")],
    }
    more = {
        "argv": ["run.py", "--passwords", "otter7", "lynx9", "--steps", "5"],
        "called": ("docker", "login", "-u", "app", "-p", "puma3"),
        "env": [{"name": "DB_PASSWORD", "value": "otter7"}],
        "auth": ["app", "lynx9"],
        "tokens": ["the", "cat", 12],
        "password": None,
        "api_key": 12345678,
    }
    assert scrubbed(more, ()) == {
        "argv": ["run.py", "--passwords", HIDDEN, HIDDEN, "--steps", "5"],
        "called": ("docker", "login", "-u", "app", "-p", HIDDEN),
        "env": [{"name": "DB_PASSWORD", "value": HIDDEN}],
        "auth": [HIDDEN, HIDDEN],
        "tokens": ["the", "cat", 12],
        "password": None,
        "api_key": HIDDEN,
    }
    two = scrubbed({"hf_0a1b2c3d4e": 1.0, "hf_9z8y7x6w5v": 2.0}, ())
    assert sorted(two.values()) == [1.0, 2.0]


def test_what_identifies_a_program_stays():
    plan = sample_plans.six(fingerprint="0123456789abcdef" * 4)
    assert scrubbed(plan, ()) is plan


# --- Every entry, every file and stream ---

PLANTED = [both for name, both in FORMS.items() if "\n" not in both[0] and name != "a quote that was cut off"]
ALL = " ; ; ".join(text for text, _ in PLANTED)


class BrokenWriter(Writer):
    def write(self, record: Record) -> None:
        del record
        raise OSError(" and ".join(text for text, _ in PLANTED if ";" not in text))


def leaked(*texts: str) -> list[str]:
    return sorted({secret for _, secret in PLANTED if any(secret in text for text in texts)})


def contents(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.read_bytes().decode("utf-8", "replace") for path in files]


def watched_run(folder: Path) -> None:
    """A run in which each text that comes from outside is one of the planted ones."""
    flags = {f"flag {number}": text for number, (text, _) in enumerate(PLANTED)}
    plan = sample_plans.six(process_flags=flags, notes=tuple(text for text, _ in PLANTED), reason=ALL)
    settings = MonitorSettings(window_s=0.01, scan_s=0.01, figure_s=0.01)
    missing = [Unavailable(figure="power", device="cpu:0", reason=text) for text, _ in PLANTED]
    probes = [jm.ScriptedProbe([missing]), LiveArraysProbe(), HostProbe()]
    with jm.MemoryMonitor(settings, logdir=folder, writer=BrokenWriter(), plan=plan, probes=probes) as monitor:
        for step in range(3):
            monitor(step, {text: float(step) for text, _ in PLANTED})
            monitor.flush()
        for text, _ in PLANTED:
            monitor.tell(MemoryEvent(kind="recovery", step=3, time_s=3.0, device="cpu:0", message=text, action=text))
        monitor.flush()


@pytest.mark.core
def test_no_secret_reaches_the_files_of_a_run_its_report_or_a_stream(tmp_path, capfd):
    watched_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "run"), "--json"]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    streams = capfd.readouterr()
    assert "BrokenWriter" in streams.err
    assert leaked(streams.out, streams.err, *contents(tmp_path)) == []


def test_no_secret_reaches_a_saved_plan_or_what_is_printed_of_it(tmp_path, capsys):
    plan = jm.Plan(
        sample_plans.six(reason=ALL, notes=tuple(text for text, _ in PLANTED), flags={"db_password": "otter7"})
    )
    (tmp_path / "plan.json").write_text(plan.to_json())
    plan.to_tensorboard(tmp_path / "page")
    assert main(["compare", str(tmp_path / "plan.json"), str(tmp_path / "plan.json")]) == 0
    streams = capsys.readouterr()
    assert leaked(str(plan), plan._repr_html_(), streams.out, streams.err, *contents(tmp_path)) == []


def test_no_secret_of_a_log_is_printed(tmp_path, capsys):
    log = tmp_path / "train.log"
    for text, secret in PLANTED[::3]:
        line = f"jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes. {text}\n"
        log.write_text(line)
        for options in ([], ["--json"]):
            assert main(["oom", str(log), *options]) == 0
            assert secret not in "".join(capsys.readouterr())


def test_json_that_hides_something_is_still_json(capsys):
    put(
        json.dumps({"a": 'x "password": "otter7" \x7f', "-----BEGIN PRIVATE KEY": ["login me password otter7", "b"]}),
        as_json=True,
    )
    read = json.loads(capsys.readouterr().out)
    assert "otter7" not in repr(read)
    assert len(read) == 2


@pytest.mark.parametrize("name", ["y_secret.yaml", "password.yaml"])
def test_a_file_that_is_named_like_a_secret_is_told_with_its_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("monitor:\n  bogus: 1\n")
    assert main(["presets", name]) == 2
    assert f"{name}:2" in capsys.readouterr().err


def test_no_secret_of_the_arguments_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["report", "runs/a", "--api-key", "otter7"])
    assert main(["compare", "nowhere?password=otter7", "nowhere"]) == 2
    streams = capsys.readouterr()
    assert "unrecognized arguments" in streams.err
    assert "otter7" not in streams.out + streams.err


def test_no_secret_reaches_a_report_of_memory_that_ran_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("REGISTRY_PASS", "marten44")
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "otter7"])
    for number in range(0, len(PLANTED), 16):
        words = " // ".join(each for each, _ in PLANTED[number : number + 16])
        msg = f"RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes; marten44; {words}"
        with contextlib.suppress(MemoryError), jm.oom_guard(outdir=tmp_path / str(number), plan_seconds=0):
            raise MemoryError(msg)
    streams = capfd.readouterr()
    texts = contents(tmp_path)
    assert any("marten44" not in text and HIDDEN in text for text in texts)
    assert leaked(streams.err, *texts) == []
    assert not any("marten44" in text for text in (streams.err, *texts))


def test_every_text_of_a_report_passes_through():
    report = hostile_report()
    planted = dataclasses.replace(
        report, sentence="password=otter7", where=("--token otter7",), versions={"x": "api_key=otter7"}
    )
    assert "otter7" not in repr(scrubbed(planted, ()))


def test_arrays_are_left_alone():
    held = {"x": jnp.ones(3), "n": 1, "none": None}
    assert scrubbed(held, ())["x"] is held["x"]
    assert isinstance(jax.tree.leaves(scrubbed(held, ()))[0], int | jax.Array)


@pytest.mark.core
def test_an_exception_of_a_writer_is_scrubbed_in_a_process_of_its_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jaxmem_callbacks as jm\n"
        "def writer(step, scalars):\n"
        "    raise RuntimeError('could not log to postgres://app:ot/te@r7@db/x with token otter7 of env heron55')\n"
        "with jm.MemoryMonitor(jm.load_preset(monitor={'window_s': 0.05, 'scan_s': 0.05}), logdir='run', writer=writer) as m:\n"
        "    for i in range(3):\n"
        "        m(i, {'loss': 1.0}); m.flush()\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MY_DEPLOY_CREDS": "heron55"}
    done = forked.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    texts = (done.stdout, done.stderr, *contents(tmp_path / "run"))
    assert "could not log to postgres://[hidden]@db/x" in done.stderr
    assert not any(secret in text for text in texts for secret in ("te@r7", "heron55"))
