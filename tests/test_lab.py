"""The chat notebook: what is stored, and (make soak) in a real JupyterLab, driven in headless Chromium as a person would.

The latter needs Chromium (or CMTRAG_CHROMIUM, the path of one) and `pip install '.[lab]'`. Screenshots go to `outputs/_test`."""
import json, os, shutil, socket, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest

ROOT  = Path(__file__).resolve().parent.parent
SHOTS = ROOT/'outputs'/'_test'
EVIL  = '</div><script>window.pwned=1</script><img src=x onerror="window.pwned=1">'

def chromium(): return os.environ.get('CMTRAG_CHROMIUM') or next((p for n in ('chromium', 'chromium-browser', 'google-chrome') if (p := shutil.which(n))), None)

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def test_the_stored_notebook_shows_a_conversation():
    "Whoever merely reads it sees turns and DAG, and no widget that needs a kernel."
    nb = json.loads((ROOT/'nbs'/'70_chat.ipynb').read_text(encoding='utf-8'))
    shown = [k for c in nb['cells'] for o in c.get('outputs', []) for k in o.get('data', {})]
    page = ''.join(t for c in nb['cells'] for o in c.get('outputs', []) for t in o.get('data', {}).get('text/html', []))
    assert page.count('class="cm-query"')==2 and page.count('class="cm-trace"')>=3 and 'image/svg+xml' in shown
    assert 'application/vnd.jupyter.widget-view+json' not in shown and 'widgets' not in nb['metadata']

def papermill(base, *given):
    "The chat notebook with other settings, as papermill sets them; what it shows, and the error output."
    env = {**os.environ, 'CMTRAG_HOME': str(base), 'CMTRAG_CACHE': str(base/'cache'), 'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
    (base/'params').mkdir(exist_ok=True)
    (base/'params'/'quick.yaml').write_text('about: for tests\nencoder: hash\nreader: span\n')
    r = subprocess.run([sys.executable, '-m', 'papermill', str(ROOT/'nbs'/'70_chat.ipynb'), str(base/'out.ipynb'), '--no-progress-bar', *given], cwd=base, env=env, capture_output=True, text=True, timeout=300)
    cells = json.loads((base/'out.ipynb').read_text(encoding='utf-8'))['cells']
    return r.returncode,''.join(str(o.get('data', o.get('text', ''))) for c in cells for o in c.get('outputs', [])),r.stderr

def test_settings_from_papermill(tmp_path):
    "A folder that is given is the one that is talked to; a setting that there is none of, or of which there is no such value, is refused."
    (tmp_path/'docs').mkdir()
    (tmp_path/'docs'/'a.md').write_text('# Labels\n\nOriole Records was founded by Morris Levy.\n\nA second text stands here.\n', encoding='utf-8')
    code,shown,err = papermill(tmp_path, '-p', 'folder', str(tmp_path/'docs'), '-p', 'profile', 'quick')
    assert code==0, err
    assert 'Chat over 1 paragraph' in shown or 'Chat over 2 paragraphs' in shown
    assert 'sample world' not in shown
    code,_,err = papermill(tmp_path, '-p', 'foldr', 'docs', '-p', 'generator', 'nobody')
    assert code and "unknown parameter 'foldr'" in err and "generator='nobody'" in err and 'auto' in err

class Endpoint:
    "An OpenAI-compatible server that can be stopped and started; it always says `reply`."
    def __init__(self, reply): self.port,self.reply,self.server,self.go = free_port(),reply,None,threading.Event()
    def start(self):
        said,go = self.reply,self.go
        go.set()
        class Handler(BaseHTTPRequestHandler):
            def send(self, d):
                b = json.dumps(d).encode()
                self.send_response(200)
                self.send_header('Content-Type', 'application/json'); self.send_header('Content-Length', str(len(b)))
                self.end_headers(); self.wfile.write(b)
            def do_GET(self): self.send(dict(object='list', data=[dict(id='stub', object='model', created=0, owned_by='test')]))
            def do_POST(self):
                self.rfile.read(int(self.headers['Content-Length']))
                go.wait(60)
                choice = dict(index=0, finish_reason='stop', message=dict(role='assistant', content=said))
                self.send(dict(id='x', object='chat.completion', created=0, model='stub', choices=[choice], usage=dict(prompt_tokens=9, completion_tokens=3, total_tokens=12)))
            def log_message(self, *a): pass
        self.server = ThreadingHTTPServer(('127.0.0.1', self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
    def stop(self):
        self.go.set()
        self.server.shutdown(); self.server.server_close()

class Lab:
    "A running JupyterLab: its address, and a notebook opened in it with other settings."
    def __init__(self, base, port, browser, endpoint, expect): self.base,self.port,self.browser,self.endpoint,self.expect = base,port,browser,endpoint,expect
    def open(self, name, **settings):
        "A copy of the chat notebook under `name`, its settings replaced, its outputs removed; all cells run."
        nb = json.loads((ROOT/'nbs'/'70_chat.ipynb').read_text(encoding='utf-8'))
        cells = [c for c in nb['cells'] if c['cell_type']=='code']
        for c in cells: c.update(outputs=[], execution_count=None)
        cell = next(c for c in cells if ''.join(c['source']).startswith('folder ='))
        for k,v in settings.items():
            lines = ''.join(cell['source']).splitlines()
            assert any(l.startswith(f'{k} =') for l in lines), f'the notebook has no setting {k}'
            cell['source'] = '\n'.join(f'{k} = {v!r}' if l.startswith(f'{k} =') else l for l in lines)
        (self.base/'nbs'/f'{name}.ipynb').write_text(json.dumps(nb), encoding='utf-8')
        page = self.browser.new_page(viewport=dict(width=1400, height=1650))
        page.set_default_timeout(30_000)
        page.goto(f'http://127.0.0.1:{self.port}/lab/workspaces/{name}/tree/{name}.ipynb?token=test')
        page.locator('.jp-Notebook .jp-Cell').first.wait_for()
        page.get_by_text('Python 3 (ipykernel) | Idle').wait_for(timeout=60_000)      # run earlier, it asks which kernel to take
        page.get_by_role('menuitem', name='Run', exact=True).click()
        page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
        failed = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
        page.locator('.cmtrag-chat').or_(failed).first.wait_for(timeout=120_000)
        assert failed.count()==0, failed.first.inner_text()
        return page

@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    sync = pytest.importorskip('playwright.sync_api', reason="playwright is not installed: pip install '.[lab]'")
    if not chromium(): pytest.skip('no Chromium found: install one, or set CMTRAG_CHROMIUM to its path')
    base,port,endpoint = tmp_path_factory.mktemp('lab'),free_port(),Endpoint(f'Morris Levy {EVIL}')
    quiet = base/'home'/'config'/'lab'/'user-settings'/'@jupyterlab'/'apputils-extension'
    for d in (base/'nbs', base/'project', base/'cache', quiet): d.mkdir(parents=True)
    (quiet/'notification.jupyterlab-settings').write_text('{"fetchNews": "false"}')
    for p in (ROOT/'.cache').glob('smollm2-*-bf16'): (base/'cache'/p.name).symlink_to(p)          # a converted model needs no second conversion
    env = {**os.environ, 'HOME': str(base/'home'), 'CMTRAG_HOME': str(base/'project'), 'CMTRAG_CACHE': str(base/'cache'), 'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1',
           'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false', 'CMTRAG_ENDPOINT_URL': f'http://127.0.0.1:{endpoint.port}/v1', 'CMTRAG_ENDPOINT_MODEL': 'stub',
           **{f'JUPYTER_{k}_DIR': str(base/'home'/k.lower()) for k in ('CONFIG', 'DATA', 'RUNTIME')}, 'IPYTHONDIR': str(base/'home'/'ipython')}
    with open(base/'lab.log', 'w') as log:
        server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=test',
                                   f'--ServerApp.root_dir={base/"nbs"}', '--LabApp.news_url=None', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate'], cwd=base, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(120):
                try:
                    urlopen(f'http://127.0.0.1:{port}/api', timeout=2)
                    break
                except OSError: time.sleep(.5)
                assert server.poll() is None, (base/'lab.log').read_text()[-3000:]
            with sync.sync_playwright() as p:
                browser = p.chromium.launch(executable_path=chromium(), args=['--no-sandbox', '--disable-gpu'])
                yield Lab(base, port, browser, endpoint, sync.expect)
                browser.close()
        finally:
            server.terminate()
            server.wait(30)

def answered(page, n):
    "Wait until turn `n` is answered; its element."
    turn = page.locator('.cmtrag-chat .cm-turn').nth(n-1)
    turn.locator('.cm-answer b').wait_for(timeout=150_000)
    return turn

def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS/f'{name}.png')

@pytest.mark.soak
def test_a_question_is_answered_on_the_page(lab):
    page = lab.open('world')
    try:
        answered(page, 2)
        chat = page.locator('.cmtrag-chat')
        chat.scroll_into_view_if_needed()
        question = chat.locator('button', has_text='Next: ').inner_text().removeprefix('Next: ')
        before = chat.locator('svg g title', has_text='T').count()
        box = chat.locator('input[type=text]')
        box.click()
        page.keyboard.type(question, delay=5)
        page.keyboard.press('Enter')
        turn = answered(page, 3)
        chat.locator('svg').evaluate("e => e.scrollIntoView({block: 'end'})")
        page.wait_for_timeout(300)
        shot(page, 'lab_chat')
        text = turn.inner_text()
        assert question in text and '→' in text and 'needs T' in text and 'keywords:' in text and ' s (plan' in text
        assert turn.locator('.cm-trace').count() >= 1 and turn.locator('.cm-par').first.is_visible() and 'score' in text
        assert len(turn.locator('.cm-par .cm-text').first.inner_text()) > 40
        first = turn.locator('.cm-id').first.inner_text()
        assert chat.locator('svg').is_visible()
        assert 'Turn 3' in chat.locator('svg').text_content() and f'{first}, turn 3' in chat.locator('svg').text_content()
        assert chat.locator('svg g title', has_text='T').count() > before
        lab.expect(box).to_have_value('')
        chat.locator('button', has_text='Fork').click()
        chat.get_by_text('conversation 2', exact=True).wait_for()
        chat.locator('button', has_text='Undo').click()
        chat.get_by_text('The last turn is taken back.').wait_for()
        lab.expect(chat.locator('.cm-turn')).to_have_count(2)
        lab.expect(chat.locator('svg')).not_to_contain_text('Turn 3')
        chat.get_by_text('conversation 1', exact=True).click()
        lab.expect(chat.locator('.cm-turn')).to_have_count(3)
        chat.locator('button', has_text='Save').click()
        chat.get_by_text('Saved: ').wait_for()
        saved = list((lab.base/'project'/'outputs'/'70_chat').glob('*.html'))
        assert len(saved)==1 and question.split()[0] in saved[0].read_text(encoding='utf-8')
        kept = lab.browser.new_page(viewport=dict(width=1200, height=1650))
        kept.goto(saved[0].as_uri())
        assert kept.locator('.cm-turn').count()==3 and kept.locator('svg').is_visible()
        shot(kept, 'lab_saved')
        kept.close()
    except BaseException:
        shot(page, 'lab_failed')
        raise
    finally: page.close()

@pytest.mark.soak
def test_foreign_text_is_text_and_a_dead_endpoint_is_told(lab):
    docs = lab.base/'docs'
    docs.mkdir()
    (docs/'labels.jsonl').write_text(json.dumps(dict(title=f'Oriole {EVIL}', text=f'Oriole Records was founded by Morris Levy {EVIL} in London.')) + '\n', encoding='utf-8')
    (docs/'page.md').write_text(f'# Labels {EVIL}\n\nOriole Records was the first British label. {EVIL} It was founded by Morris Levy.\n', encoding='utf-8')
    (docs/'page.html').write_text('<html><body><h1>Shops</h1><p>Morris Levy sold bicycles &lt;img src=x onerror="window.pwned=1"&gt; in London.</p></body></html>', encoding='utf-8')
    lab.endpoint.start()
    page = lab.open('folder', folder=str(docs), reader='endpoint', generator='query')
    try:
        chat = page.locator('.cmtrag-chat')
        box  = chat.locator('input[type=text]')
        box.fill(f'Who founded Oriole Records? {EVIL}')
        chat.locator('button', has_text='Send').click()
        turn = answered(page, 1)
        turn.locator('summary').first.click()
        shot(page, 'lab_hostile')
        text = turn.inner_text()
        assert chat.locator('svg').is_visible()
        assert text.count('onerror="window.pwned=1"') >= 4 and 'labels.jsonl:1' in text and 'page.md' in text
        assert page.evaluate('window.pwned')==None and turn.locator('script, img').count()==0
        lab.endpoint.go.clear()                                      # a server that takes its time: the steps so far are on the page, and the turn can be stopped
        box.fill('What did Morris Levy sell?')
        page.keyboard.press('Enter')
        chat.locator('.cm-trace i', has_text='reading …').wait_for()
        assert chat.locator('.cm-turn').nth(1).locator('summary').is_visible() and chat.locator('button', has_text='Send').is_disabled()
        shot(page, 'lab_reading')
        chat.locator('button', has_text='Stop').click()
        error = chat.locator('.cm-turn .cm-error')
        error.wait_for()
        assert 'stopped' in error.inner_text()
        lab.expect(box).to_have_value('What did Morris Levy sell?')
        lab.endpoint.stop()                                          # a server that is gone
        box.press('Enter')
        chat.locator('.cm-error', has_text=str(lab.endpoint.port)).wait_for(timeout=90_000)
        shot(page, 'lab_error')
        assert 'Not answered.' in error.inner_text() and str(lab.endpoint.port) in error.inner_text()
        lab.expect(box).to_have_value('What did Morris Levy sell?')
        lab.expect(chat.locator('button', has_text='Send')).to_be_enabled()
        lab.endpoint.start()
        chat.locator('button', has_text='Send').click()
        answered(page, 2)
        lab.expect(chat.locator('.cm-error')).to_have_count(0)
        lab.expect(chat.locator('.cm-turn')).to_have_count(2)
        lab.endpoint.stop()
        assert page.evaluate('window.pwned')==None
    except BaseException:
        shot(page, 'lab_failed')
        raise
    finally: page.close()
