"""A dialogue through an OpenAI-compatible endpoint: a real server on a local port in `make soak`, its recorded replies in `make test`.

The soak test starts `transformers serve` on the small model's folder, holds the dialogue through it and compares; run with
`CMTRAG_RECORD=1` it writes `tests/data/endpoint.jsonl` anew."""
import os, socket, subprocess, sys, time
from pathlib import Path
from urllib.request import urlopen

import pytest

from cmtrag.experiment import eval_source
from cmtrag.drafts import GoldGenerator
from cmtrag.llm import EndpointLLM, RecordedLLM, SmolLM
from cmtrag.mumuqa import load_dialogues
from cmtrag.pipeline import CMTSystem, hold
from cmtrag.reader import Reader
from cmtrag.retrieval import HashEncoder, Index, Retriever

REPLIES = Path(__file__).parent/'data'/'endpoint.jsonl'
DIALOGUE = Path(__file__).parent/'data'/'endpoint_dialogue.jsonl'  # of the tiny sample world, kept: replies are recorded for its very words

def hold_one(llm):
    corpus,(dialogue,) = eval_source('world', 'dev', size='tiny').corpus,load_dialogues(DIALOGUE)
    system = CMTSystem('oracle', GoldGenerator, Retriever(Index.build(corpus, HashEncoder(512)), corpus), Reader(llm, prompt='completion', max_tokens=24))
    return dialogue,hold(system, dialogue)

def check(dialogue, turns):
    assert len(turns)==len(dialogue.turns) and all(t.answer for t in turns)
    assert [n.id for t in turns for n in t.nodes]==[t.id for t in dialogue.traces]

def test_recorded_replies():
    check(*hold_one(RecordedLLM(REPLIES)))

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

@pytest.mark.soak
def test_real_server(tmp_path):
    folder,port = SmolLM().folder(),free_port()
    log = open(tmp_path/'server.log', 'w')
    server = subprocess.Popen([str(Path(sys.executable).parent/'transformers'), 'serve', str(folder), '--host', '127.0.0.1', '--port', str(port), '--device', 'cpu'],
                              stdout=log, stderr=subprocess.STDOUT, env={**os.environ, 'HF_HUB_OFFLINE':'1'})
    try:
        for _ in range(120):
            try:
                urlopen(f'http://127.0.0.1:{port}/health', timeout=2)
                break
            except OSError: time.sleep(1)
            assert server.poll() is None, (tmp_path/'server.log').read_text()[-3000:]
        llm = EndpointLLM(f'http://127.0.0.1:{port}/v1', str(folder), name='smollm2-135m-instruct')
        llm.check()
        if os.environ.get('CMTRAG_RECORD'):
            REPLIES.parent.mkdir(exist_ok=True)
            REPLIES.unlink(missing_ok=True)
            llm = RecordedLLM(REPLIES, llm, raw=False)
        check(*hold_one(llm))
    finally:
        server.terminate()
        server.wait(20)
